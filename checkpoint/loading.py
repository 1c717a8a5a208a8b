"""Whether a job may begin with another job's checkpoint: `checkpoint.load` beside what is stored.

`outlast plan` and `outlast submit` ask it from where they run, and rank 0's node before a process
is made; `outlast resume --checkpoint URL` has the controller compare the model. A rank compares
every tensor when it loads. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.storage.storage import Storage
from outlast.errors import OutlastError
from outlast.problems import FieldProblem, shown
from outlast.rules.loads import wrong_with_model
from outlast.rules.places import NO_CHECKPOINT, wrong_with_steps
from outlast.sizing.of_spec import num_parameters
from outlast.spec import JobSpec
from outlast.tokens.manifest import BYTE, read_manifest

if TYPE_CHECKING:
    from checkpoint.core.manifest import Manifest

# How names of parameters begin in a checkpoint, beside those of the optimizer's state.
_MODEL = "model."
# In what an imported checkpoint says of itself: whether its folder had a tokenizer.
TOKENIZER = "has_tokenizer"


def wrong_to_load(spec: JobSpec, url: str, storage: Storage) -> list[FieldProblem]:
    """Why the job cannot begin with what is stored at `url`, if that is so.

    Raises:
        OutlastError, OSError: storage does not answer.
    """
    steps, wanted = sorted(storage.committed_steps()), spec.checkpoint.load_step
    if not steps:
        message = (
            f"is {shown(url)}, which {NO_CHECKPOINT}: `outlast status JOB` prints where its "
            "checkpoints lie"
        )
        return [FieldProblem(field="checkpoint.load", message=message)]
    end = None if spec.checkpoint.load_weights_only else spec.steps
    wrong = wrong_with_steps(url, steps, wanted, end)
    if wrong is not None:
        field = "checkpoint.load" if wanted is None else "checkpoint.load_step"
        return [FieldProblem(field=field, message=wrong)]
    found = _first_readable(storage, steps[::-1] if wanted is None else [wanted])
    if found is None:
        # A rank says what is damaged.
        return []
    step, manifest = found
    wrong = wrong_with_saved_model(spec, url, step, manifest)
    if wrong is not None:
        return [FieldProblem(field="checkpoint.load", message=wrong)]
    return _other_ids(spec, url, manifest)


def wrong_with_saved_model(spec: JobSpec, url: str, step: int, manifest: Manifest) -> str | None:
    """Why the checkpoint of `step` at `url` is of another model than the job's; None if it fits."""
    wrong = wrong_with_model(url, step, manifest.tensors, spec)
    return wrong or _other_size(spec, url, step, manifest)


def _other_ids(spec: JobSpec, url: str, manifest: Manifest) -> list[FieldProblem]:
    """Weights that read the ids of a tokenizer would be given bytes."""
    extra = json.loads(manifest.parts[0].extra)
    if not (isinstance(extra, dict) and extra.get(TOKENIZER)):
        return []
    of_bytes = next((name for name in spec.data.weights if _is_of_bytes(name)), None)
    if spec.data.tokens is None:
        what = "is not given, so that bytes would be the ids"
    elif of_bytes is not None:
        what = f"has {shown(of_bytes)}, whose ids are bytes"
    else:
        return []
    folder = extra.get("converted_from")
    message = (
        f"{what}, and the weights at {shown(url)} read those of the tokenizer in {folder}: give "
        f"what `outlast data prepare --tokenizer {folder}` makes"
    )
    return [FieldProblem(field="data.tokens", message=message)]


def _is_of_bytes(name: str) -> bool:
    """Whether a folder of tokens here says that its tokenizer was that of bytes."""
    folder = Path(name)
    # What is wrong with it is said elsewhere.
    with contextlib.suppress(OSError, ValueError):
        return folder.is_dir() and read_manifest(folder).tokenizer == BYTE
    return False


def _other_size(spec: JobSpec, url: str, step: int, manifest: Manifest) -> str | None:
    """Why the checkpoint is of a model of another size; None if it is not, or nothing is known."""
    shapes = [shape for name, (_, shape) in manifest.tensors.items() if name.startswith(_MODEL)]
    held, needed = sum(map(math.prod, shapes)), num_parameters(spec)
    if not shapes or held == needed:
        return None
    return (
        f"is {shown(url)}, whose step {step} holds a model of {held:,} parameters, and that of the "
        f"model section has {needed:,}; give the model section of the job that saved it "
        "(`outlast status JOB --json` has its spec)"
    )


def _first_readable(storage: Storage, steps: Sequence[int]) -> tuple[int, Manifest] | None:
    """As a job does that passes over damaged ones for the next older."""
    for step in steps:
        try:
            return step, storage.read_commit(step)[1]
        except (OutlastError, OSError):
            continue
    return None
