"""Small models of `transformers`, by their configs, for tests of `checkpoint.hf`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, KV_HEADS, MLP = 4, 32, 4, 2, 48
VOCAB, SEQ_LEN, WINDOW = 96, 80, 24

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": MLP,
    "max_position_embeddings": SEQ_LEN,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Wider than the model's own, as Qwen 3's and Gemma's are.
_WIDE_HEADS = {"head_dim": 12}


_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
# Names that files have, where those in memory are others.
_SAVED_AS = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
_GRANITE_EXPERTS = {
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
}


def _rope(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": kind, **others}}


def _ropes(kind: str, *, local_theta: float = 10_000.0, **others: Any) -> dict[str, Any]:
    """Of layers that see everything, and of those with a window."""
    local = {"rope_theta": local_theta, "rope_type": "default"}
    whole = _rope(kind, **others)["rope_parameters"]
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_EARLIER = {"original_max_position_embeddings": 32}

_GPT = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": SEQ_LEN,
    "n_inner": MLP,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_OTHER_NAMES = ("num_key_value_heads", "intermediate_size")
_FALCON = {
    **{name: value for name, value in _SHAPE.items() if name not in _OTHER_NAMES},
    "ffn_hidden_size": MLP,
}

_NEOX = {name: value for name, value in _SHAPE.items() if name != "num_key_value_heads"}

# By name: the classes of `transformers`, and options of the config.
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-of-rules": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_SHAPE, **_rope("llama3", factor=8.0, **_LLAMA3, **_EARLIER), "mlp_bias": True},
    ),
    "llama-linear": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_SHAPE, **_rope("linear", factor=4.0), "attention_bias": True},
    ),
    "llama-dynamic": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_SHAPE, **_rope("dynamic", factor=4.0), "max_position_embeddings": 32},
    ),
    "mistral-yarn": (
        "MistralForCausalLM",
        "MistralConfig",
        {**_SHAPE, **_rope("yarn", factor=2.5, **_EARLIER), "sliding_window": WINDOW},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_SHAPE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SHAPE, **_WIDE_HEADS}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_SHAPE, **_WIDE_HEADS}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **_SHAPE,
            **_WIDE_HEADS,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    # The second layer sees everything, with scaled positions; the others turn by another base.
    "gemma3-of-rules": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_SHAPE,
            **_WIDE_HEADS,
            **_ropes("linear", local_theta=200.0, factor=8.0),
            "sliding_window": WINDOW,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {**_SHAPE, "no_rope_layers": [1, 0, 1, 0]},
    ),
    "granite": (
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            **_SHAPE,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
        },
    ),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", _SHAPE),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", {**_SHAPE, "attention_bias": True}),
    "olmo3": (
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {**_SHAPE, **_ropes("yarn", factor=2.5, **_EARLIER), "sliding_window": WINDOW},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_SHAPE, "sliding_window": WINDOW}),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        {**_SHAPE, "sliding_window": WINDOW},
    ),
    "nemotron": (
        "NemotronForCausalLM",
        "NemotronConfig",
        {**_SHAPE, **_rope("default", partial_rotary_factor=0.5)},
    ),
    "nemotron-with-biases": (
        "NemotronForCausalLM",
        "NemotronConfig",
        {
            **_SHAPE,
            **_WIDE_HEADS,
            **_rope("linear", factor=4.0, partial_rotary_factor=0.5),
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "phi-of-rules": (
        "PhiForCausalLM",
        "PhiConfig",
        {**_SHAPE, **_rope("default", partial_rotary_factor=0.5)},
    ),
    "neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_NEOX, **_rope("default", partial_rotary_factor=0.25)},
    ),
    "neox-serial": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_NEOX, "use_parallel_residual": False, "attention_bias": False},
    ),
    "gpt2-of-rules": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_GPT, "activation_function": "relu"},
    ),
    "gpt": (
        "OpenAIGPTLMHeadModel",
        "OpenAIGPTConfig",
        {name: value for name, value in _GPT.items() if name != "n_inner"},
    ),
    "bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", _GPT),
    "bigcode-many-queries": (
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {**_GPT, "multi_query": False},
    ),
    "gptj-of-rules": ("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**_GPT, "rotary_dim": 4}),
    "falcon-7b": ("FalconForCausalLM", "FalconConfig", _FALCON),
    "falcon-40b": (
        "FalconForCausalLM",
        "FalconConfig",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS},
    ),
    "falcon-11b": (
        "FalconForCausalLM",
        "FalconConfig",
        {
            **_FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": KV_HEADS,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
        },
    ),
    "falcon-serial": (
        "FalconForCausalLM",
        "FalconConfig",
        {**_FALCON, "parallel_attn": False, "multi_query": False, "bias": True},
    ),
    "stablelm": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {**_SHAPE, **_rope("default", partial_rotary_factor=0.25), "use_qkv_bias": True},
    ),
    "stablelm-parallel": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {
            **_SHAPE,
            **_rope("default", partial_rotary_factor=0.5),
            "use_parallel_residual": True,
            "use_qkv_bias": True,
        },
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**_SHAPE, "attention_bias": True}),
    "cohere2-of-rules": ("Cohere2ForCausalLM", "Cohere2Config", {**_SHAPE, "sliding_window": 24}),
    "glm": (
        "GlmForCausalLM",
        "GlmConfig",
        {**_SHAPE, **_WIDE_HEADS, **_rope("default", partial_rotary_factor=0.5)},
    ),
    "glm4": (
        "Glm4ForCausalLM",
        "Glm4Config",
        {**_SHAPE, **_WIDE_HEADS, **_rope("default", partial_rotary_factor=0.5)},
    ),
    "helium": (
        "HeliumForCausalLM",
        "HeliumConfig",
        {**_SHAPE, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    ),
}
_BERT = {
    **{name: value for name, value in _SHAPE.items() if name != "num_key_value_heads"},
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
CONFIGS |= {
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "bert-with-order": (
        "BertForPreTraining",
        "BertConfig",
        {**_BERT, "architectures": ["BertForPreTraining"]},
    ),
    # Twelve heads: no power of two.
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": LAYERS, "n_head": 12},
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {
            "vocab_size": VOCAB,
            "d_model": HIDDEN,
            "n_layers": LAYERS,
            "n_heads": HEADS,
            "max_seq_len": SEQ_LEN,
            "attn_config": {"softmax_scale": 0.3},
        },
    ),
    # With the router's loss, of all layers together.
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            **_SHAPE,
            "num_local_experts": 4,
            "sliding_window": WINDOW,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.05,
        },
    ),
    # A shared expert without a gate, and all experts of a layer in one tensor.
    "granite-moe": (
        "GraniteMoeSharedForCausalLM",
        "GraniteMoeSharedConfig",
        {
            **_SHAPE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 8.0,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.05,
        },
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_SHAPE,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.05,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **_SHAPE,
            **_WIDE_HEADS,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "output_router_logits": True,
            "router_aux_loss_coef": 0.05,
        },
    ),
}
# Those that go on with a text; the others predict hidden tokens.
CAUSAL = tuple(name for name, (kind, *_) in CONFIGS.items() if not kind.startswith("Bert"))
ORDERED = ("bert-with-order",)
# What a spec adds to the section: of the second tensor rank half the rows are padding, or all.
_PADDED = {"qwen3": {"vocab_multiple": 128}, "gemma": {"vocab_multiple": 256}}


def section_for(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The model section of the spec that the ranks run."""
    from checkpoint.hf.sections import section_of

    # One length for all, beyond what some were first trained on.
    return {**section_of(config), **_PADDED.get(name, {}), "seq_len": SEQ_LEN}


def load(folder: Path, **options: Any) -> Any:
    """The model of a folder, as the class that its config names."""
    import torch
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    found = getattr(transformers, architecture)
    return found.from_pretrained(folder, dtype=torch.float32, **options)


def logits_of(found: Any) -> Any:
    """Of the tokens."""
    return found.prediction_logits if hasattr(found, "prediction_logits") else found.logits


def loss_of(
    model: Any,
    tokens: Any,
    targets: Any,
    micro_batch: int,
    segments: Any = None,
    swapped: Any = None,
) -> Any:
    """The mean loss over targets that are not -1, and over sequences whose order is predicted.

    The router's, where the config asks for it, is of each micro-batch by itself.
    """
    import torch

    if segments is not None:
        both = {"labels": targets.where(targets >= 0, -100), "next_sentence_label": swapped}
        return model(tokens, token_type_ids=segments, **both).loss
    if not getattr(model.config, "output_router_logits", False):
        logits = model(tokens, use_cache=False).logits
        flat = logits.flatten(0, 1), targets.flatten()
        return torch.nn.functional.cross_entropy(*flat, ignore_index=-1)
    losses = []
    for part, wanted in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
        found = model(part, use_cache=False)
        loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), wanted.flatten())
        losses.append(loss + model.config.router_aux_loss_coef * found.aux_loss)
    return torch.stack(losses).mean()


def by_rules(section: Mapping[str, Any], family: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of `transformers` under our names, all of them used and given back as they were."""
    import torch

    from checkpoint.hf.families import FAMILIES
    from checkpoint.hf.sections import rules_of
    from outlast.model import ModelSpec

    saved_as = _SAVED_AS.get(family, {})
    theirs = {saved_as.get(name, name): torch.from_numpy(each) for name, each in arrays.items()}
    theirs = dict(_experts_apart(family, theirs))
    found, returned = {}, {}
    for rule in rules_of(ModelSpec.model_validate(dict(section)), FAMILIES[family]):
        ours = rule.to_ours(theirs)
        found[rule.ours] = ours.numpy()
        returned |= rule.to_theirs(ours)
    assert returned.keys() == theirs.keys()
    assert all(torch.equal(returned[name], tensor) for name, tensor in theirs.items())
    return found


def _experts_apart(family: str, found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Experts are tensors of their own in files, and one in memory."""
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else _EXPERT_NAMES
    for name, tensor in found.items():
        if family == "granitemoeshared":
            for in_memory, in_file in _GRANITE_EXPERTS.items():
                name = name.replace(in_memory, in_file)
        if family == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                for part, rows in zip((gate, up), both.chunk(2), strict=True):
                    yield name.replace("gate_up_proj", f"{expert}.{part}.weight"), rows
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(tensor):
                yield name.replace("down_proj", f"{expert}.{down}.weight"), rows
        else:
            yield name, tensor
