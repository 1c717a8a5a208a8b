"""Which checkpoints and which remains of unfinished ones to delete.

A checkpoint stays when any reason keeps it: it is among the newest, or among the newest
of those that lie an interval apart, its step is a multiple that is kept for good, its
metric is among the best, a person pinned it, or somebody is reading it. One whose records
cannot be read proves nothing: it is never counted among the newest, and goes only when it
is older than all of them.

Remains are judged by age, by the store's own clock: those of a node may differ
by minutes.

What does not belong here: deleting, and looking at clocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What stays of a job's checkpoints besides pinned ones."""

    keep: int
    """So many of the newest, and so many of the newest that are `spacing_steps` apart."""
    spacing_steps: int = 1
    """Graceful stops make checkpoints soon after others: these take no older one's place."""
    every_steps: int | None = None
    """Each whose step is a multiple of this."""
    best: int = 0
    """So many with the smallest metric; of equals, the newer."""

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; at least the newest checkpoint is kept")
        if self.spacing_steps < 1:
            raise ValueError(f"spacing_steps is {self.spacing_steps}; it counts steps")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps is {self.every_steps}; it counts steps")
        if self.best < 0:
            raise ValueError(f"best is {self.best}; it counts checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedStep:
    """A checkpoint that exists. `attempt` is None when its records cannot be read.

    `metric` is what `RetentionPolicy.best` goes by: smaller is better, None is unknown.
    """

    step: int
    attempt: int | None
    metric: float | None = None
    is_pinned: bool = False
    is_read: bool = False


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
    committed: Sequence[CommittedStep],
    folders: Sequence[AttemptFolder],
    policy: RetentionPolicy,
    *,
    busy: Collection[tuple[int, int]] = (),
) -> Cleanup:
    """What may go under `policy`.

    Folders in `busy`, named by step and attempt, stay: somebody waits for their parts,
    or they were found corrupt and a person may want to look at them.
    """
    kept = kept_steps(committed, policy)
    if committed and not kept:
        # Records that all cannot be read are a riddle for a person, not for us.
        return Cleanup(delete_steps=(), sweep=())
    named = {one.step: one.attempt for one in committed}
    deleted = tuple(sorted(step for step in named if step not in kept))
    return Cleanup(
        delete_steps=deleted,
        sweep=tuple(
            folder
            for folder in folders
            if folder.step not in deleted
            and (folder.step, folder.attempt) not in busy
            # A record that cannot be read may name any attempt.
            and not (folder.step in named and named[folder.step] in (None, folder.attempt))
        ),
    )


def kept_steps(committed: Sequence[CommittedStep], policy: RetentionPolicy) -> frozenset[int]:
    """Steps that stay; none of them when no checkpoint can be vouched for."""
    newest_first = sorted(committed, key=lambda one: one.step, reverse=True)
    whole = [one for one in newest_first if one.attempt is not None]
    if not whole:
        return frozenset()
    newest = whole[: policy.keep]
    rated = sorted((one for one in whole if _is_rated(one)), key=_rating)
    kept = {one.step for one in (*newest, *_apart(whole, policy), *rated[: policy.best])}
    for one in committed:
        is_multiple = policy.every_steps is not None and one.step % policy.every_steps == 0
        is_damaged_and_new = one.attempt is None and one.step > newest[-1].step
        if one.is_pinned or one.is_read or is_multiple or is_damaged_and_new:
            kept.add(one.step)
    return frozenset(kept)


def _apart(newest_first: Sequence[CommittedStep], policy: RetentionPolicy) -> list[CommittedStep]:
    """The newest, and each time the next that is far enough below the one before.

    A rollback counts on the last of them: it is `(keep - 1) * spacing_steps` older than the
    newest, or the oldest that there ever was.
    """
    taken = [*newest_first[:1]]
    for one in newest_first:
        if len(taken) < policy.keep and one.step <= taken[-1].step - policy.spacing_steps:
            taken.append(one)
    return taken if len(taken) == policy.keep else [*taken, newest_first[-1]]


def is_abandoned(
    folder: AttemptFolder,
    *,
    written_at_s: Sequence[float | None],
    now_s: float,
    grace_s: float,
    oldest_kept: int,
) -> bool:
    """Whether nobody can be writing a folder that no commit names any more.

    `written_at_s` are the times of its files, and `now_s` is of the same clock. Where a
    store gives none, the folder must be older than every checkpoint that is kept.
    """
    known = [at for at in written_at_s if at is not None]
    if len(known) < len(written_at_s) or not known:
        return folder.step < oldest_kept
    return now_s - max(known) > grace_s


def is_lease_held(written_at_s: float | None, *, now_s: float, lasts_s: float) -> bool:
    """Whether a reader's lease still counts; one without a time counts for ever."""
    return written_at_s is None or now_s - written_at_s <= lasts_s


def _is_rated(one: CommittedStep) -> bool:
    return one.metric is not None and math.isfinite(one.metric)


def _rating(one: CommittedStep) -> tuple[float, int]:
    assert one.metric is not None, "only rated checkpoints are compared"
    return (one.metric, -one.step)
