"""Published models by name: what `model.preset` of a spec stands for.

Fields that a spec gives beside the preset count instead of the preset's. What a
row leaves out is a default of `outlast.model.ModelSpec`. A name keeps its meaning: a
checkpoint is loaded by the model section that saved it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PresetName = Literal[
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "megatron-1.2b",
    "megatron-2.5b",
    "megatron-4.2b",
    "megatron-8.3b",
    "bert-336m",
    "bert-1.3b",
    "bert-3.9b",
    "ptd-1.7b",
    "ptd-3.6b",
    "ptd-7.5b",
    "ptd-18.4b",
    "ptd-39.1b",
    "ptd-76.1b",
    "ptd-145.6b",
    "ptd-310.1b",
    "ptd-529.6b",
    "ptd-1t",
    "megascale-175b",
    "megascale-530b",
    "llama3-8b",
    "llama3-70b",
    "llama3-405b",
    "llama3.1-8b",
    "llama3.1-70b",
    "llama3.1-405b",
    "mistral-7b",
    "mixtral-8x7b",
    "qwen3-0.6b",
    "qwen3-1.7b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A published model: fields of the spec's model section, and who published it."""

    source: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What models of one source have in common."""

    source: str
    common: Mapping[str, Any]

    def model(self, layers: int, hidden: int, heads: int, **others: Any) -> Preset:
        shape = {"layers": layers, "hidden": hidden, "heads": heads}
        return Preset(source=self.source, fields={**self.common, **shape, **others})


_GPT2 = _Family(source="Radford 2019", common={"vocab_size": 50257, "seq_len": 1024})
# GPT-2's vocabulary, padded to a multiple of 1024 = 128 x 8 tensor ranks.
_MEGATRON = _Family(source="arXiv 1909.08053", common={"vocab_size": 51200, "seq_len": 1024})
# Norms before attention and MLP, which let it grow; BERT's vocabulary of 30,522, padded; and the
# order of two parts predicted, as it is there unless --bert-no-binary-head is given.
_MEGATRON_BERT = _Family(
    source="arXiv 1909.08053",
    common={
        "vocab_size": 30720,
        "seq_len": 512,
        "attention": "bidirectional",
        "segments": 2,
        "sentence_order": True,
        "head_transform": True,
        "head_bias": True,
    },
)
_PTD = _Family(source="arXiv 2104.04473", common={"vocab_size": 51200, "seq_len": 2048})
# The width of its window is not published, so there is none.
_MEGASCALE = _Family(
    source="arXiv 2402.15627",
    common={"vocab_size": 64000, "seq_len": 2048, "block": "parallel"},
)
_LLAMA_LIKE = {
    "kv_heads": 8,
    "tied_embeddings": False,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rope",
    "attention_bias": False,
    "mlp_bias": False,
}
_LLAMA3 = _Family(
    source="arXiv 2407.21783",
    common={**_LLAMA_LIKE, "vocab_size": 128256, "seq_len": 8192, "rope_theta": 500_000.0},
)
_LLAMA3_1 = _Family(
    source="arXiv 2407.21783",
    common={
        **_LLAMA3.common,
        "seq_len": 131_072,
        "rope_scaling": {"kind": "llama3", "factor": 8.0, "original_seq_len": 8192},
    },
)
_QWEN3 = _Family(
    source="arXiv 2505.09388",
    common={
        **_LLAMA_LIKE,
        "vocab_size": 151_936,
        "seq_len": 32_768,
        "norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "head_width": 128,
        "qk_norm": "head",
    },
)
_MISTRAL = _Family(
    source="arXiv 2310.06825",
    common={**_LLAMA_LIKE, "vocab_size": 32000, "seq_len": 8192, "window": 4096},
)
_MIXTRAL = _Family(
    source="arXiv 2401.04088",
    common={
        **_LLAMA_LIKE,
        "vocab_size": 32000,
        "seq_len": 32_768,
        "rope_theta": 1_000_000.0,
        "moe": {
            "num_experts": 8,
            "router_aux_loss_coef": 0.02,
            "router_aux_loss_over": "model",
        },
    },
)
_QWEN3_EXPERTS = {
    "num_experts": 128,
    "experts_per_token": 8,
    "ffn_hidden": 768,
    "router_aux_loss_coef": 0.001,
    "router_aux_loss_over": "model",
}

PRESETS: Mapping[str, Preset] = {
    #                          layers  hidden  heads
    "gpt2": _GPT2.model(12, 768, 12),
    "gpt2-medium": _GPT2.model(24, 1024, 16),
    "gpt2-large": _GPT2.model(36, 1280, 20),
    "gpt2-xl": _GPT2.model(48, 1600, 25),
    "megatron-1.2b": _MEGATRON.model(40, 1536, 16),
    "megatron-2.5b": _MEGATRON.model(54, 1920, 20),
    "megatron-4.2b": _MEGATRON.model(64, 2304, 24),
    "megatron-8.3b": _MEGATRON.model(72, 3072, 32),
    "bert-336m": _MEGATRON_BERT.model(24, 1024, 16),
    "bert-1.3b": _MEGATRON_BERT.model(24, 2048, 32),
    "bert-3.9b": _MEGATRON_BERT.model(48, 2560, 40),
    "ptd-1.7b": _PTD.model(24, 2304, 24),
    "ptd-3.6b": _PTD.model(30, 3072, 32),
    "ptd-7.5b": _PTD.model(36, 4096, 32),
    "ptd-18.4b": _PTD.model(40, 6144, 48),
    "ptd-39.1b": _PTD.model(48, 8192, 64),
    "ptd-76.1b": _PTD.model(60, 10240, 80),
    "ptd-145.6b": _PTD.model(80, 12288, 96),
    "ptd-310.1b": _PTD.model(96, 16384, 128),
    "ptd-529.6b": _PTD.model(105, 20480, 128),
    "ptd-1t": _PTD.model(128, 25600, 160),
    "megascale-175b": _MEGASCALE.model(96, 12288, 128),
    "megascale-530b": _MEGASCALE.model(105, 20480, 160),
    "llama3-8b": _LLAMA3.model(32, 4096, 32, ffn_hidden=14336),
    "llama3-70b": _LLAMA3.model(80, 8192, 64, ffn_hidden=28672),
    "llama3-405b": _LLAMA3.model(126, 16384, 128, ffn_hidden=53248),
    "llama3.1-8b": _LLAMA3_1.model(32, 4096, 32, ffn_hidden=14336),
    "llama3.1-70b": _LLAMA3_1.model(80, 8192, 64, ffn_hidden=28672),
    "llama3.1-405b": _LLAMA3_1.model(126, 16384, 128, ffn_hidden=53248),
    "mistral-7b": _MISTRAL.model(32, 4096, 32, ffn_hidden=14336),
    "mixtral-8x7b": _MIXTRAL.model(32, 4096, 32, ffn_hidden=14336),
    "qwen3-0.6b": _QWEN3.model(28, 1024, 16, ffn_hidden=3072, tied_embeddings=True),
    "qwen3-1.7b": _QWEN3.model(28, 2048, 16, ffn_hidden=6144, tied_embeddings=True),
    "qwen3-4b": _QWEN3.model(36, 2560, 32, ffn_hidden=9728, tied_embeddings=True),
    "qwen3-8b": _QWEN3.model(36, 4096, 32, ffn_hidden=12288),
    "qwen3-14b": _QWEN3.model(40, 5120, 40, ffn_hidden=17408),
    "qwen3-32b": _QWEN3.model(64, 5120, 64, ffn_hidden=25600),
    "qwen3-30b-a3b": _QWEN3.model(48, 2048, 32, kv_heads=4, ffn_hidden=6144, moe=_QWEN3_EXPERTS),
}
