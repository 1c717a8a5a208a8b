"""Which checkpoints and which remains of unfinished ones to delete.

Only what is older than the newest commit is ever touched: a folder at or beyond
it may be one that somebody is about to commit.

What does not belong here: deleting, and looking at clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFolder:
    """What an attempt wrote of a step, committed or not."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleanup:
    """Checkpoints to delete, oldest first, and folders that no commit names."""

    delete_steps: tuple[int, ...]
    sweep: tuple[AttemptFolder, ...]


def plan_cleanup(
    committed: Mapping[int, int | None],
    folders: Sequence[AttemptFolder],
    *,
    keep: int,
    quarantined: Collection[tuple[int, int]] = (),
) -> Cleanup:
    """What may go, to keep the newest `keep` checkpoints.

    `committed` gives the attempt of every committed step, None where the record cannot
    be read: then nothing of that step is swept. Quarantined folders, named by step and
    attempt, stay until a person removes them.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest checkpoint is kept")
    steps = sorted(committed, reverse=True)
    if not steps:
        return Cleanup(delete_steps=(), sweep=())
    outdated = set(steps[keep:])
    return Cleanup(
        delete_steps=tuple(sorted(outdated)),
        sweep=tuple(
            folder
            for folder in folders
            if folder.step < steps[0]
            and folder.step not in outdated
            and (folder.step, folder.attempt) not in quarantined
            and not _is_named(committed, folder)
        ),
    )


def is_abandoned(
    folder: AttemptFolder,
    *,
    written_at_s: Sequence[float | None],
    now_s: float,
    grace_s: float,
    oldest_kept: int,
) -> bool:
    """Whether nobody can be writing a folder that no commit names any more.

    `written_at_s` are the times of its files. Where a store gives none, the folder must
    be older than every checkpoint that is kept.
    """
    known = [at for at in written_at_s if at is not None]
    if len(known) < len(written_at_s) or not known:
        return folder.step < oldest_kept
    return now_s - max(known) > grace_s


def _is_named(committed: Mapping[int, int | None], folder: AttemptFolder) -> bool:
    if folder.step not in committed:
        return False
    attempt = committed[folder.step]
    return attempt is None or attempt == folder.attempt
