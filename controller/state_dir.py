"""The folder that a controller keeps its state in."""

from __future__ import annotations

import json
import os
from pathlib import Path

from controller.store.lock import StateLock, check_free
from controller.store.reserve import Reserve
from outlast.errors import FatalError

# SQLite has others beside it, whose names begin with this one.
JOURNAL = "journal.sqlite"
# There where the journal is in a database of another server.
_ELSEWHERE = "journal-in-database"


class StateDirError(FatalError):
    """The state directory cannot be used."""


def open_state_dir(state_dir: Path, *, looks_first: bool = False) -> StateLock:
    """The lock of a directory that can be written.

    With `looks_first` nothing of it is touched while another controller has it.

    Raises:
        LockedError: another controller has it.
        StateDirError: it cannot be written.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if looks_first:
            check_free(state_dir)
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


def use_journal(state_dir: Path, *, is_here: bool) -> None:
    """Note where the journal is, and begin none beside one that is somewhere else.

    Raises:
        StateDirError: there is one here, or was one elsewhere: its jobs would be unknown, and their
            workers be stopped.
    """
    elsewhere = state_dir / _ELSEWHERE
    if is_here and elsewhere.exists():
        raise StateDirError(
            f"the journal of {state_dir} is in a database: name it with --journal, or delete "
            f"{elsewhere} to begin without its jobs"
        )
    if is_here:
        return
    if (state_dir / JOURNAL).exists():
        raise StateDirError(
            f"{state_dir} has a journal of its own, {JOURNAL}: start without --journal, or move it "
            "away to begin without its jobs"
        )
    elsewhere.touch(mode=0o600)


def forget_jobs(state_dir: Path) -> None:
    """Drop the journal. Checkpoints and prepared data stay: they are the user's."""
    for path in state_dir.glob(f"{JOURNAL}*"):
        path.unlink()


def write_whole(path: Path, document: object) -> None:
    """The file has all of the document or what it had before."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(document))
    draft.replace(path)
