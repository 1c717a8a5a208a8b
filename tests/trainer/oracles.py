"""transformers' own models with random weights, in our names and our order of rows.

Run as a program (`python -m tests.trainer.oracles FOLDER`) it writes a file for each model
with its weights, logits, loss and gradients as arrays, and what it was given: transformers takes
long to import, and ranks must not import it. Everyone else reads `MODELS`.
"""

# H query heads, G key/value heads (groups), D model width.
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.trainer.hf_models import CONFIGS, ORDERED, by_rules, logits_of, loss_of, section_for

LAYERS, HIDDEN, HEADS, KV_HEADS, MLP = 4, 32, 4, 2, 48
VOCAB, SEQ_LEN, SAMPLES, WINDOW = 96, 80, 8, 24
MICRO_BATCH = 2

_COMMON = {
    "layers": LAYERS,
    "hidden": HIDDEN,
    "heads": HEADS,
    "ffn_hidden": MLP,
    "vocab_size": VOCAB,
    "seq_len": SEQ_LEN,
    "tied_embeddings": False,
    "positions": "rope",
}
_LLAMA = {
    "kv_heads": KV_HEADS,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "attention_bias": False,
    "mlp_bias": False,
}
_GPTJ = {
    "block": "parallel",
    "rope_fraction": 0.5,
    "rope_pairs": "neighbours",
    "attention_bias": False,
    "head_bias": True,
}
_COHERE2 = {
    **_LLAMA,
    "norm": "layernorm",
    "norm_bias": False,
    "block": "parallel",
    "rope_pairs": "neighbours",
    "tied_embeddings": True,
    "window": WINDOW,
    "logit_scale": 0.25,
}
_NEOX = {"activation": "gelu", "rope_fraction": 0.25}

# What our spec says about a model, by the name of transformers' one.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _COMMON | {"positions": "learned", "tied_embeddings": True},
    "llama": _COMMON | _LLAMA,
    "mistral": _COMMON | _LLAMA | {"window": WINDOW},
    "gptj": _COMMON | _GPTJ,
    "phi": _COMMON | {"block": "parallel", "rope_fraction": 0.5, "head_bias": True},
    "cohere2": _COMMON | _COHERE2,
    "neox-parallel": _COMMON | _NEOX | {"block": "parallel", "block_norms": 2},
    "neox-sequential": _COMMON | _NEOX,
}

Arrays = dict[str, Any]
# From one of transformers' arrays by name, of a layer, to ours.
Get = Callable[[str], Any]


def main(folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, VOCAB, (2, SAMPLES, SEQ_LEN))
    given: Arrays = {"tokens": tokens.numpy(), "targets": targets.numpy()}
    # Cut at another place in each sequence.
    cuts = torch.arange(SAMPLES)[:, None] * 9 + 5
    segments, swapped = (torch.arange(SEQ_LEN) >= cuts).long(), torch.arange(SAMPLES) % 3 // 2
    given |= {"segments": segments.numpy(), "swapped": swapped.numpy()}
    for name in (*MODELS, *CONFIGS):
        model = build(name)
        ordered = name in ORDERED
        more = {"token_type_ids": segments} if ordered else {"use_cache": False}
        with torch.no_grad():
            logits = logits_of(model(tokens, **more))
        sentences = (segments, swapped) if ordered else ()
        loss = loss_of(model, tokens, targets, MICRO_BATCH, *sentences)
        loss.backward()
        found = {**given, "logits": logits.numpy(), "loss": loss.item(), **arrays_of(name, model)}
        np.savez(Path(folder) / f"{name}.npz", **found)


def arrays_of(name: str, model: Any) -> Arrays:
    """Its weights and gradients under our names, and its section where rules make one."""
    found: Arrays = {}
    parameters = dict(model.named_parameters())
    weights = {key: value.detach().numpy() for key, value in parameters.items()}
    gradients = {key: value.grad.numpy() for key, value in parameters.items()}
    for kind, arrays in (("weights", weights), ("gradients", gradients)):
        if name in CONFIGS:
            section = section_for(name, model.config.to_dict())
            found["section"] = json.dumps(section)
            ours = by_rules(section, model.config.model_type, arrays)
        else:
            ours = _MAPPINGS[name](arrays, kind == "gradients")
        found |= {f"{kind}/{key}": array for key, array in ours.items()}
    return found


def build(name: str) -> Any:
    """The model of that name, in fp64 and with random weights."""
    import torch
    import transformers

    model_class, config_class, options = (_CLASSES | CONFIGS)[name]
    config = getattr(transformers, config_class)(**options)
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, model_class)(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Large enough that every gradient is far from zero; norms' weights near one.
            start = 1.0 if float(parameter.flatten()[0]) == 1.0 else 0.0
            parameter.copy_(start + 0.2 * torch.randn_like(parameter))
    return model


_ROPE = {"rope_theta": 10_000.0, "rope_type": "default"}
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": MLP,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GPT_SHAPE = {
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
_GROUPED = {**_SHAPE, "num_key_value_heads": KV_HEADS, "rope_parameters": _ROPE}
_RMS = {**_GROUPED, "rms_norm_eps": 1e-5}
_NEOX_SHAPE = {**_SHAPE, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}}

_CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT_SHAPE),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _RMS),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_RMS, "sliding_window": WINDOW}),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_GPT_SHAPE, "rotary_dim": 4}),
    "phi": (
        "PhiForCausalLM",
        "PhiConfig",
        {**_SHAPE, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {
            **_GROUPED,
            "sliding_window": WINDOW,
            "logit_scale": 0.25,
            # Its layers with full attention have no rotary positions, ours have.
            "layer_types": ["sliding_attention"] * LAYERS,
        },
    ),
    "neox-parallel": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_NEOX_SHAPE, "use_parallel_residual": True},
    ),
    "neox-sequential": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_NEOX_SHAPE, "use_parallel_residual": False},
    ),
}


def _by_group(groups: int, *parts: Any) -> Any:
    """Rows of several arrays, group by group."""
    rows = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(rows, axis=1).reshape(-1, *parts[0].shape[1:])


def _columns_by_group(groups: int, *parts: Any) -> Any:
    return _by_group(groups, *(part.T for part in parts)).T


def _pair(ours: str, theirs: str, get: Get) -> Arrays:
    """A weight and its bias."""
    return {f"{ours}.{part}": get(f"{theirs}.{part}") for part in ("weight", "bias")}


def _gpt2(arrays: Arrays, _: bool) -> Arrays:
    found = {
        "tokens.weight": arrays["transformer.wte.weight"],
        "positions.weight": arrays["transformer.wpe.weight"],
        **_pair("norm", "transformer.ln_f", arrays.__getitem__),
    }
    for layer in range(LAYERS):
        # Its linear layers keep [in, out].
        def get(name: str, layer: int = layer) -> Any:
            return arrays[f"transformer.h.{layer}.{name}"].T

        block = {
            **_pair("attention_norm", "ln_1", get),
            **_pair("mlp_norm", "ln_2", get),
            **_pair("attention.out", "attn.c_proj", get),
            **_pair("mlp.up", "mlp.c_fc", get),
            **_pair("mlp.down", "mlp.c_proj", get),
        }
        for part in ("weight", "bias"):
            qkv = np.split(get(f"attn.c_attn.{part}"), 3)
            block[f"attention.qkv.{part}"] = _by_group(HEADS, *qkv)
        found |= {f"blocks.{layer}.{name}": array for name, array in block.items()}
    return found


def _llama(arrays: Arrays, _: bool) -> Arrays:
    found = {
        "tokens.weight": arrays["model.embed_tokens.weight"],
        "norm.weight": arrays["model.norm.weight"],
        "head.weight": arrays["lm_head.weight"],
    }
    for layer in range(LAYERS):
        get = _of_layer(arrays, f"model.layers.{layer}")
        qkv = (get(f"self_attn.{name}_proj.weight") for name in "qkv")
        block = {
            "attention_norm.weight": get("input_layernorm.weight"),
            "attention.qkv.weight": _by_group(KV_HEADS, *qkv),
            "attention.out.weight": get("self_attn.o_proj.weight"),
            "mlp_norm.weight": get("post_attention_layernorm.weight"),
            "mlp.up.weight": np.stack((get("mlp.gate_proj.weight"), get("mlp.up_proj.weight"))),
            "mlp.down.weight": get("mlp.down_proj.weight"),
        }
        found |= {f"blocks.{layer}.{name}": array for name, array in block.items()}
    return found


def _gptj(arrays: Arrays, _: bool) -> Arrays:
    found = {
        "tokens.weight": arrays["transformer.wte.weight"],
        **_pair("norm", "transformer.ln_f", arrays.__getitem__),
        **_pair("head", "lm_head", arrays.__getitem__),
    }
    for layer in range(LAYERS):
        get = _of_layer(arrays, f"transformer.h.{layer}")
        qkv = (get(f"attn.{name}_proj.weight") for name in "qkv")
        block = {
            **_pair("input.norm", "ln_1", get),
            "input.weight": _by_group(HEADS, *qkv, get("mlp.fc_in.weight")),
            "input.bias": get("mlp.fc_in.bias"),
            "output.weight": _columns_by_group(
                HEADS, get("attn.out_proj.weight"), get("mlp.fc_out.weight")
            ),
            "output.bias": get("mlp.fc_out.bias"),
        }
        found |= {f"blocks.{layer}.{name}": array for name, array in block.items()}
    return found


def _phi(arrays: Arrays, gradients: bool) -> Arrays:
    found = {
        "tokens.weight": arrays["model.embed_tokens.weight"],
        **_pair("norm", "model.final_layernorm", arrays.__getitem__),
        **_pair("head", "lm_head", arrays.__getitem__),
    }
    for layer in range(LAYERS):
        get = _of_layer(arrays, f"model.layers.{layer}")
        qkv = [[get(f"self_attn.{name}_proj.{part}") for name in "qkv"] for part in _PARTS]
        block = {
            **_pair("input.norm", "input_layernorm", get),
            "input.weight": _by_group(HEADS, *qkv[0], get("mlp.fc1.weight")),
            "input.attention_bias": _by_group(HEADS, *qkv[1]),
            "input.bias": get("mlp.fc1.bias"),
            "output.weight": _columns_by_group(
                HEADS, get("self_attn.dense.weight"), get("mlp.fc2.weight")
            ),
            "output.bias": _one_bias(get("self_attn.dense.bias"), get("mlp.fc2.bias"), gradients),
        }
        found |= {f"blocks.{layer}.{name}": array for name, array in block.items()}
    return found


def _cohere2(arrays: Arrays, _: bool) -> Arrays:
    found = {
        "tokens.weight": arrays["model.embed_tokens.weight"],
        "norm.weight": arrays["model.norm.weight"],
    }
    for layer in range(LAYERS):
        get = _of_layer(arrays, f"model.layers.{layer}")
        rows = [get(f"self_attn.{name}_proj.weight") for name in "qkv"]
        rows += [get(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
        block = {
            "input.norm.weight": get("input_layernorm.weight"),
            "input.weight": _by_group(KV_HEADS, *rows),
            "output.weight": _columns_by_group(
                KV_HEADS, get("self_attn.o_proj.weight"), get("mlp.down_proj.weight")
            ),
        }
        found |= {f"blocks.{layer}.{name}": array for name, array in block.items()}
    return found


def _neox_parallel(arrays: Arrays, gradients: bool) -> Arrays:
    found = _neox_ends(arrays)
    for layer in range(LAYERS):
        get = _of_layer(arrays, f"gpt_neox.layers.{layer}")
        attention, mlp = "attention.dense", "mlp.dense_4h_to_h"
        block = {
            **_pair("input.attention_norm", "input_layernorm", get),
            **_pair("input.qkv", "attention.query_key_value", get),
            **_pair("input.mlp_norm", "post_attention_layernorm", get),
            **_pair("input.up", "mlp.dense_h_to_4h", get),
            "output.weight": _columns_by_group(
                HEADS, get(f"{attention}.weight"), get(f"{mlp}.weight")
            ),
            "output.bias": _one_bias(get(f"{attention}.bias"), get(f"{mlp}.bias"), gradients),
        }
        found |= {f"blocks.{layer}.{name}": array for name, array in block.items()}
    return found


def _neox_sequential(arrays: Arrays, _: bool) -> Arrays:
    found = _neox_ends(arrays)
    for layer in range(LAYERS):
        get = _of_layer(arrays, f"gpt_neox.layers.{layer}")
        block = {
            **_pair("attention_norm", "input_layernorm", get),
            **_pair("attention.qkv", "attention.query_key_value", get),
            **_pair("attention.out", "attention.dense", get),
            **_pair("mlp_norm", "post_attention_layernorm", get),
            **_pair("mlp.up", "mlp.dense_h_to_4h", get),
            **_pair("mlp.down", "mlp.dense_4h_to_h", get),
        }
        found |= {f"blocks.{layer}.{name}": array for name, array in block.items()}
    return found


def _neox_ends(arrays: Arrays) -> Arrays:
    return {
        "tokens.weight": arrays["gpt_neox.embed_in.weight"],
        **_pair("norm", "gpt_neox.final_layer_norm", arrays.__getitem__),
        "head.weight": arrays["lm_head.weight"],
    }


def _of_layer(arrays: Arrays, prefix: str) -> Get:
    return lambda name: arrays[f"{prefix}.{name}"]


def _one_bias(attention: Any, mlp: Any, gradients: bool) -> Any:
    """Two biases on one sum are one bias; each has that one's gradient."""
    return attention if gradients else attention + mlp


_PARTS = ("weight", "bias")
_MAPPINGS: dict[str, Callable[[Arrays, bool], Arrays]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "gptj": _gptj,
    "phi": _phi,
    "cohere2": _cohere2,
    "neox-parallel": _neox_parallel,
    "neox-sequential": _neox_sequential,
}


if __name__ == "__main__":
    main(sys.argv[1])
