"""Options of config.json as well-known models are published with, held to `transformers`.

What a release says besides the model differs from what `transformers` writes today: options of
other programs, older names, and defaults that are left out.
"""

from __future__ import annotations

from typing import Any

import pytest

from checkpoint.hf.errors import UnsupportedModelError
from checkpoint.hf.sections import compared, config_like, section_of
from outlast.model import ModelSpec

_GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
_GPTJ = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "gradient_checkpointing": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "resid_pdrop": 0.0,
    "rotary": True,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "use_cache": True,
    "vocab_size": 50400,
}
_GEMMA = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
_GEMMA2 = {
    **_GEMMA,
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "max_sequence_length": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 32000,
}
_LLAMA31 = {
    **_LLAMA,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2-medium": {
        **_GPT2,
        "n_embd": 1024,
        "n_head": 16,
        "n_layer": 24,
        "n_special": 0,
        "predict_special_tokens": True,
    },
    "gpt-j": _GPTJ,
    "codegen": {
        **{name: value for name, value in _GPTJ.items() if name != "rotary"},
        "architectures": ["CodeGenForCausalLM"],
        "model_type": "codegen",
        "n_ctx": 2048,
        "n_embd": 1024,
        "n_layer": 20,
        "rotary_dim": 32,
        "vocab_size": 51200,
    },
    "starcoder": {
        **{name: value for name, value in _GPT2.items() if name != "n_ctx"},
        "activation_function": "gelu_pytorch_tanh",
        "architectures": ["GPTBigCodeForCausalLM"],
        "attention_softmax_in_fp32": True,
        "inference_runner": 0,
        "max_batch_size": None,
        "max_sequence_length": None,
        "model_type": "gpt_bigcode",
        "multi_query": True,
        "n_embd": 6144,
        "n_head": 48,
        "n_inner": 24576,
        "n_layer": 40,
        "n_positions": 8192,
        "pad_key_length": True,
        "pre_allocate_kv_cache": False,
        "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True,
        "validate_runner_input": True,
        "vocab_size": 49152,
    },
    "falcon-7b": {
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "architectures": ["FalconForCausalLM"],
        "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"},
        "bias": False,
        "hidden_dropout": 0.0,
        "hidden_size": 4544,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "falcon",
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "parallel_attn": True,
        "use_cache": True,
        "vocab_size": 65024,
    },
    "pythia": {
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_act": "gelu",
        "hidden_size": 512,
        "initializer_range": 0.02,
        "intermediate_size": 2048,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 8,
        "num_hidden_layers": 6,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": {
        **{name: value for name, value in _GEMMA2.items() if name != "hidden_act"},
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "llama-2": _LLAMA,
    "llama-3.1": _LLAMA31,
    "smollm2": {
        **_LLAMA,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "vocab_size": 49152,
    },
    "mixtral": {
        **{name: value for name, value in _LLAMA.items() if name != "rms_norm_eps"},
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    },
    "qwen2": {
        **_LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_mrope": False,
        "use_sliding_window": False,
    },
}


def understood(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as `transformers` writes it once it has read it."""
    from transformers import AutoConfig

    given = {name: value for name, value in config.items() if name != "model_type"}
    found: dict[str, Any] = AutoConfig.for_model(config["model_type"], **given).to_dict()
    return found


def read(config: dict[str, Any]) -> dict[str, Any]:
    """What decides the model that we take a config for."""
    return compared(ModelSpec.model_validate(section_of(config)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_the_model_that_transformers_takes_it_for(name: str) -> None:
    assert read(PUBLISHED[name]) == read(understood(PUBLISHED[name]))


# Where they have a default, which differs from one family to another.
LEFT_OUT = {
    "mixtral": ("rms_norm_eps", "rope_theta"),
    "falcon-7b": ("max_position_embeddings", "layer_norm_epsilon", "rope_theta"),
    "pythia": ("max_position_embeddings", "layer_norm_eps", "rotary_pct"),
    "qwen2": ("rms_norm_eps", "max_window_layers"),
}


@pytest.mark.parametrize(
    ("name", "left_out"), [(name, each) for name, names in LEFT_OUT.items() for each in names]
)
def test_what_is_left_out_is_what_transformers_takes_it_for(name: str, left_out: str) -> None:
    config = {**PUBLISHED[name], "use_sliding_window": name == "qwen2"}
    config.pop(left_out, None)
    assert read(config) == read(understood(config))


def test_an_export_says_nothing_of_the_older_names_that_its_folder_had() -> None:
    """`transformers` would take the older ones."""
    section = section_of(_LLAMA31)
    scaling = {**section["rope_scaling"], "factor": 32.0}
    model = ModelSpec.model_validate({**section, "rope_theta": 2e6, "rope_scaling": scaling})
    _, written = config_like({**_LLAMA31, "bos_token_id": 7}, model)
    assert written["bos_token_id"] == 7
    assert not {"rope_theta", "rope_scaling"} & set(written)
    theirs = ModelSpec.model_validate(section_of(understood(written)))
    assert (theirs.rope_theta, theirs.rope_scaling.factor) == (2e6, 32.0)


def test_a_model_that_was_trained_on_shorter_sequences_reads_as_long_ones_as_before() -> None:
    model = ModelSpec.model_validate({**section_of(_LLAMA31), "seq_len": 4096})
    _, written = config_like(_LLAMA31, model)
    assert written["max_position_embeddings"] == 131072
    longer = ModelSpec.model_validate({**section_of(_LLAMA), "seq_len": 16384})
    assert config_like(_LLAMA, longer)[1]["max_position_embeddings"] == 16384


def test_older_and_newer_options_that_contradict_each_other_are_refused() -> None:
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    older = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(UnsupportedModelError, match=r"rope_scaling = .* says something else"):
        section_of({**_LLAMA, **newer, **older})
    assert section_of({**_LLAMA, "rope_parameters": older["rope_scaling"], **older})
