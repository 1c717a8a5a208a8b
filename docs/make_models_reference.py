"""Write the reference page of models from the code, so that it cannot drift.

`python docs/make_models_reference.py` rewrites docs/reference/models.md; a test compares it with
what the code says now.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from checkpoint.hf.families import FAMILIES, LACKING
from checkpoint.hf.family import Family
from outlast.presets import PRESETS
from outlast.sizing.of_spec import num_parameters
from outlast.spec import JobSpec

PAGE = Path(__file__).parent / "reference" / "models.md"

_HEAD = """# Models

Generated from `outlast/presets.py` and `checkpoint/hf/` by `python docs/make_models_reference.py`.
"""
_PRESETS = """## By name

`model: {preset: llama3-8b, layers: 4}` in a spec is a published model, of which fields that are
given beside it count instead of its own. `outlast models NAME` prints the fields, FLOPs per token
and state bytes.
"""
_FAMILIES = """## Weights of Hugging Face

`outlast import hf DIR URL --spec job.yaml` makes a folder that `save_pretrained` wrote a
checkpoint of step 0, and `checkpoint.load: URL` begins with it: weights only, with a fresh
optimizer, on any layout. `outlast export hf JOB|URL DIR` writes a checkpoint as such a folder.
What is imported and exported is the same to the bit, and logits, loss and gradients equal those
of `transformers`. So do, in fp32 within 1e-5, the losses of three steps of AdamW at tp 2 and pp 2,
and the weights that these leave.

Options beside these are refused by their name unless they are off or change nothing that is
computed.
"""
_LACKING = """## What is refused

A model is never taken for another one that is nearly the same. These are refused for what they
need:
"""


def page() -> str:
    """The whole page."""
    families = [
        (f"`{family.name}`", f"`{family.architecture}`", _options(family))
        for family in FAMILIES.values()
    ]
    presets = [
        (f"`{name}`", f"{_parameters(name):,}", preset.source) for name, preset in PRESETS.items()
    ]
    lacking = [(f"`{name}`", needs) for name, needs in LACKING.items()]
    parts = [
        *(_HEAD, _PRESETS, _table(("preset", "parameters", "source"), presets)),
        *(_FAMILIES, _table(("`model_type`", "architecture", "options"), families)),
        *(_LACKING, _table(("`model_type`", "needs"), lacking)),
    ]
    return "\n".join(parts)


def _parameters(name: str) -> int:
    return num_parameters(JobSpec.model_validate({"name": name, "model": {"preset": name}}))


def _options(family: Family) -> str:
    names = [option.theirs for option in family.options]
    names += [name for mixed in family.mixed for name in mixed.theirs]
    if family.rotary:
        names += ["max_position_embeddings", "rope_parameters"]
    if family.windows != "none":
        names.append("sliding_window")
    if family.windows == "by_layer":
        names += ["layer_types", "use_sliding_window"]
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
