"""Where the weights of a checkpoint come from."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkpoint.hf import folder as folders
from checkpoint.hf.errors import DamagedFolderError, UnsupportedModelError
from checkpoint.hf.sections import config_of, family_of
from checkpoint.storage.storage import Storage
from outlast.errors import OutlastError
from outlast.spec import JobSpec


def extra_of(storage: Storage, step: int) -> dict[str, Any]:
    """What a checkpoint says besides tensors.

    Raises:
        CorruptCheckpointError: it is damaged.
        StorageUnavailableError: the store does not answer.
    """
    _, manifest = storage.read_commit(step)
    found = json.loads(manifest.parts[0].extra)
    return found if isinstance(found, dict) else {}


def imported_folder(storage: Storage, step: int, job: JobSpec) -> Path | None:
    """The folder of Hugging Face that a checkpoint was imported from, or the one that its job
    began with; None where there was none. It may be gone."""
    found = converted_from(storage, step)
    if found is None and job.checkpoint.load is not None:
        # Whatever there is to say of it, the checkpoint itself is whole.
        with suppress(OutlastError, ValueError, OSError):
            first = Storage(job.checkpoint.load)
            steps = first.committed_steps()
            found = converted_from(first, max(steps)) if steps else None
    return found


def pattern_of_export(storage: Storage, step: int, job: JobSpec) -> Path | None:
    """The imported folder, where it is there, and of an architecture that has the job's model."""
    found = imported_folder(storage, step, job)
    if found is None:
        return None
    try:
        config_of(job.model, family_of(folders.read_config(found)))
    except (UnsupportedModelError, DamagedFolderError):
        return None
    return found


def converted_from(storage: Storage, step: int) -> Path | None:
    """The folder of Hugging Face that a checkpoint itself was imported from; it may be gone.

    Raises:
        CorruptCheckpointError: the checkpoint is damaged.
        StorageUnavailableError: the store does not answer.
    """
    named = extra_of(storage, step).get("converted_from")
    return Path(named) if isinstance(named, str) else None
