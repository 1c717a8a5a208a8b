"""The folder that a controller keeps its state in."""

from __future__ import annotations

import json
import os
from pathlib import Path

from controller.store.lock import StateLock
from controller.store.reserve import Reserve
from outlast.errors import FatalError

# SQLite has others beside it, whose names begin with this one.
JOURNAL = "journal.sqlite"


class StateDirError(FatalError):
    """The state directory cannot be used."""


def open_state_dir(state_dir: Path) -> StateLock:
    """The lock of a directory that can be written.

    Raises:
        StateDirError: it cannot be.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        Reserve(state_dir).make_room()
        probe = state_dir / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
        return StateLock(state_dir)
    except OSError as error:
        raise StateDirError(
            f"the state directory {state_dir} cannot be written: {error.strerror or error}; "
            "give another with --state-dir"
        ) from error


def forget_jobs(state_dir: Path) -> None:
    """Drop the journal. Checkpoints and prepared data stay: they are the user's."""
    for path in state_dir.glob(f"{JOURNAL}*"):
        path.unlink()


def write_whole(path: Path, document: object) -> None:
    """The file has all of the document or what it had before."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document))
    draft.replace(path)
