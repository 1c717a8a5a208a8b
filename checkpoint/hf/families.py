"""The architectures of `transformers` that are models of ours, and well-known ones that are not.

What reads them is in `sections.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from checkpoint.hf.families_alibi import ALIBI_FAMILIES
from checkpoint.hf.families_bert import BERT_FAMILIES
from checkpoint.hf.families_gpt import GPT_FAMILIES
from checkpoint.hf.families_llama import LLAMA_FAMILIES
from checkpoint.hf.families_moe import MOE_FAMILIES
from checkpoint.hf.family import Family

# Well-known architectures that are refused, and what of them we lack or have not mapped.
LACKING: Mapping[str, str] = {
    "deepseek_v2": "latent attention",
    "deepseek_v3": "latent attention",
    "dots1": "a router of sigmoids, whose scores are corrected",
    "ernie4_5_moe": "a router whose scores are corrected",
    "gemma3": "an encoder of images",
    "glm4_moe": "a router of sigmoids, whose scores are corrected",
    "gpt_oss": "attention sinks",
    "llama4_text": "attention in chunks",
    "nemotron_h": "layers with a state",
    "qwen3_next": "linear attention",
    "t5": "an encoder",
}
FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        *(*LLAMA_FAMILIES, *GPT_FAMILIES, *ALIBI_FAMILIES, *MOE_FAMILIES, *BERT_FAMILIES),
    )
}
