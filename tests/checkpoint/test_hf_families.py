"""What a `config.json` of Hugging Face is in a spec, what is refused, and the way back."""

from __future__ import annotations

import re
from typing import Any

import pytest

from checkpoint.hf.errors import UnsupportedModelError
from checkpoint.hf.families import FAMILIES, LACKING
from checkpoint.hf.sections import compared, config_of, section_of
from outlast.model import ModelSpec
from outlast.sizing.of_spec import num_parameters
from outlast.spec.parse import parse_spec
from tests.trainer.hf_models import CONFIGS

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
# The published config of Llama 3.1 8B, as far as it says what is computed.
LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}


def family_name(config_class: str) -> str:
    name = config_class.removesuffix("Config").lower()
    return {
        "gemma3text": "gemma3_text",
        "openaigpt": "openai-gpt",
        "gptneox": "gpt_neox",
        "gptbigcode": "gpt_bigcode",
        "qwen2moe": "qwen2_moe",
        "qwen3moe": "qwen3_moe",
    }.get(name, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_section_goes_back_to_the_config_that_it_is_of(name: str) -> None:
    _, config_class, given = CONFIGS[name]
    family = FAMILIES[family_name(config_class)]
    model = ModelSpec.model_validate(section_of({"model_type": family.name, **given}))
    written = section_of(config_of(model, family))
    assert compared(ModelSpec.model_validate(written)) == compared(model)


def test_every_family_is_held_to_transformers() -> None:
    assert {family_name(config_class) for _, config_class, _ in CONFIGS.values()} == set(FAMILIES)


def test_a_published_config_is_a_spec_that_may_be_submitted() -> None:
    spec = parse_spec({"name": "a", "model": section_of(LLAMA_3_1)})
    assert num_parameters(spec) == 8_030_261_248
    scaling = spec.model.rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_seq_len) == ("llama3", 8.0, 8192)
    preset = parse_spec({"name": "a", "model": {"preset": "llama3-8b"}}).model
    assert spec.model.shape.block_weights(0) == preset.shape.block_weights(0)


# As published, of BLOOM 560M and MPT 7B.
BLOOM = {
    "model_type": "bloom",
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "hidden_dropout": 0.0,
    "masked_softmax_fusion": True,
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "skip_bias_add": True,
    "slow_but_exact": False,
    "vocab_size": 250880,
}
MPT = {
    "model_type": "mpt",
    "attn_config": {"alibi": True, "attn_impl": "torch", "clip_qkv": None, "qk_ln": False},
    "d_model": 4096,
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "verbose": 0,
    "vocab_size": 50432,
}


# Where what it does not say is as published.
GPT = {"model_type": "openai-gpt", "n_ctx": 512, "n_special": 0, "vocab_size": 40478}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(BLOOM, 559_214_592), (MPT, 6_649_286_656), (GPT, 116_534_784)],
    ids=["bloom", "mpt", "gpt"],
)
def test_published_models_have_their_size(config: dict[str, Any], parameters: int) -> None:
    spec = parse_spec({"name": "a", "model": section_of(config)})
    assert num_parameters(spec) == parameters


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({}, ["rope", "rope", "rope", "none"]),
        ({"no_rope_layer_interval": 2}, ["rope", "none"]),
        ({"no_rope_layer_interval": 2, "no_rope_layers": [1] * 8}, ["rope"]),
    ],
)
def test_layers_without_positions_follow_an_interval_or_a_list(
    given: dict[str, Any], pattern: list[str]
) -> None:
    config = {**LLAMA, "model_type": "smollm3", "num_hidden_layers": 8, **given}
    assert section_of(config)["rope_pattern"] == pattern


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("smollm3", "rope_theta", 2_000_000.0),
        ("cohere", "rope_theta", 500_000.0),
        ("helium", "rope_theta", 100_000.0),
        ("phi", "rope_fraction", 0.5),
        ("gpt_neox", "rope_fraction", 0.25),
        ("stablelm", "rope_fraction", 0.25),
        # 4096, of sequences of 128.
        ("mistral", "window", 128),
        ("gemma2", "window", 128),
    ],
)
def test_what_a_config_leaves_out_is_what_it_is_in_transformers(
    model_type: str, field: str, value: float
) -> None:
    assert section_of({**LLAMA, "model_type": model_type})[field] == value


def test_an_older_config_says_both_bases_of_gemma_3() -> None:
    """As the published config of Gemma 3 4B does."""
    older = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 64,
        "sliding_window_pattern": 6,
    }
    section = section_of({**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 8, **older})
    assert (section["rope_theta"], section["rope_local_theta"]) == (1e6, 1e4)
    assert section["rope_scaling"] == {"kind": "linear", "factor": 8.0}
    assert section["window_pattern"] == ["local"] * 5 + ["global"]


def test_a_window_counts_where_it_is_used() -> None:
    qwen = {**LLAMA, "model_type": "qwen3", "sliding_window": 64, "max_window_layers": 0}
    assert "window" not in section_of(qwen)
    assert section_of({**qwen, "use_sliding_window": True})["window"] == 64


@pytest.mark.parametrize("model_type", ["mamba", None, 3])
def test_an_unknown_architecture_is_refused_with_the_known_ones(model_type: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"known are: llama, .*gpt2"):
        section_of({"model_type": model_type})


def test_the_pooler_of_a_published_bert_is_left_out() -> None:
    config = {"model_type": "bert", "directionality": "bidi", "pooler_fc_size": 768}
    spec = {"name": "a", "model": section_of(config), "data": {"tokens": "/a"}}
    masked = {"fraction": 0.15, "mask_token": 103}
    found = parse_spec({**spec, "data": {"tokens": "/a", "masked": masked}})
    # 109.5 million as published, with the pooler.
    assert num_parameters(found) == 109_514_298
    model = found.model.model_copy(update={"segments": 0})
    with pytest.raises(UnsupportedModelError, match="type_vocab_size"):
        config_of(model, FAMILIES["bert"])


def test_a_bert_of_one_segment_has_no_second_head() -> None:
    config = {"model_type": "bert", "type_vocab_size": 1}
    assert not section_of({**config, "architectures": ["BertForMaskedLM"]})["sentence_order"]
    with pytest.raises(UnsupportedModelError, match=r"type_vocab_size = 1 .*: 2 or more"):
        section_of({**config, "architectures": ["BertForPreTraining"]})


@pytest.mark.parametrize("model_type", LACKING)
def test_a_known_architecture_that_we_lack_is_refused_with_what_it_needs(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(LACKING[model_type])):
        section_of({"model_type": model_type})
    assert model_type not in FAMILIES


OPTIONS: dict[str, dict[str, Any]] = {
    "hidden_act": {"hidden_act": "quick_gelu"},
    "rope_type": {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
    "rope_parameters.truncate": {
        "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}
    },
    "clip_qkv": {"model_type": "olmo", "clip_qkv": 8.0},
    "use_bidirectional_attention": {"model_type": "gemma", "use_bidirectional_attention": True},
    "layer_types": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "chunked_attention"],
    },
    "rope_type ": {
        "model_type": "phi3",
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    },
    "scale_attn_weights": {"model_type": "gpt2", "scale_attn_weights": False},
    "embd_pdrop": {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.1},
    "alibi": {"model_type": "falcon", "alibi": True},
    "qk_layernorm": {"model_type": "stablelm", "qk_layernorm": True},
    "use_qk_norm": {"model_type": "cohere", "use_qk_norm": True},
    "head_dim": {"model_type": "cohere2", "head_dim": 32},
    "rotary_dim": {"model_type": "gptj", "n_embd": 64, "n_head": 4, "rotary_dim": 32},
    "attn_logit_softcapping": {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
    "use_bidirectional_attention ": {
        "model_type": "gemma3_text",
        "use_bidirectional_attention": True,
    },
    "rope_parameters.sliding_attention.rope_type": {
        "model_type": "gemma3_text",
        "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
    },
    "rope_parameters.rope_type": {
        "model_type": "olmo3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "apply_residual_connection_post_layernorm": {
        "model_type": "bloom",
        "apply_residual_connection_post_layernorm": True,
        "intermediate_size": None,
        "max_position_embeddings": None,
    },
    "attn_config.alibi": {"model_type": "mpt", "attn_config": {"alibi": False}},
    "clip_qkv ": {"model_type": "mpt", "attn_config": {"clip_qkv": 6.0}},
    "quantization_config": {"quantization_config": {"bits": 4}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_we_lack_is_refused_by_its_name(option: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^config\.json: {option.strip()} = "):
        section_of({**LLAMA, **OPTIONS[option]})


def test_a_model_that_a_family_does_not_have_is_not_written() -> None:
    model = ModelSpec.model_validate({**section_of(LLAMA), "qk_norm": "head"})
    with pytest.raises(UnsupportedModelError, match=r"no model with model\.qk_norm = head"):
        config_of(model, FAMILIES["llama"])
