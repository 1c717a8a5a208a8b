"""Deletes what retention does not keep, and what dead uploads left behind.

All times are the store's own: the clocks of nodes may differ from it and from
each other.

What does not belong here: what stays (`core/retention.py`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from dataclasses import replace

from checkpoint.core import names
from checkpoint.core.checked_json import RecordError
from checkpoint.core.manifest import CommitRecord, Manifest
from checkpoint.core.retention import (
    AttemptFolder,
    CommittedStep,
    RetentionPolicy,
    is_abandoned,
    plan_cleanup,
)
from checkpoint.errors import CorruptCheckpointError
from checkpoint.storage.leases import drop_expired_leases, leased_steps, pinned_steps
from checkpoint.storage.storage import Storage
from outlast.chosen import ChosenStart, is_given_up
from outlast.crashpoints import CrashPoint, reach

logger = logging.getLogger(__name__)

# A store's clock may be corrected by so much at once, and run faster than ours by a tenth: one
# that was set forward by an hour is followed in ten.
_MOST_LEAP_S = 1.0
_MOST_RATE = 1.1


class Cleaner:
    """Applies one job's retention. Used by one thread.

    `grace_s` is how long after its last sign of life a writer may still be alive.
    """

    def __init__(
        self,
        storage: Storage,
        policy: RetentionPolicy,
        *,
        grace_s: float,
        chosen: tuple[ChosenStart, ...] = (),
    ) -> None:
        self._storage = storage
        self._chosen = chosen
        self._policy = policy
        self._grace_s = grace_s
        # By step, newest first. Records never change, so each is read once.
        self._known: dict[int, CommittedStep] = {}
        # By the store's clock, and by ours, at the last look.
        self._looked_s: tuple[float, float] | None = None

    def clean(self, waiting: Collection[tuple[int, int]]) -> None:
        """Delete what may go; folders that parts are awaited in, by step and attempt, stay.

        Raises:
            StorageUnavailableError: storage does not answer, or does not delete.
        """
        self._clean(waiting, deletes=True)

    def sweep(self) -> None:
        """Delete only what dead uploads left; every checkpoint stays."""
        self._clean((), deletes=False)

    def _clean(self, waiting: Collection[tuple[int, int]], *, deletes: bool) -> None:
        storage = self._storage
        now_s = self._now_s()
        reach(CrashPoint.CLEANING)
        self._read_new()
        over, is_choosing = self._over(waiting)
        for step in over:
            # Its upload was under way when a person chose to go on elsewhere. It would count as
            # one of the newest, and keep this step from being committed anew.
            logger.info("given-up checkpoint set aside: step %d", step)
            storage.quarantine_step(step)
            del self._known[step]
        # What a person can still choose stays, and what was chosen may be the oldest.
        deletes = deletes and not is_choosing
        committed = self._committed(now_s)
        busy = {*waiting, *quarantined(storage)}
        plan = plan_cleanup(committed, attempt_folders(storage), self._policy, busy=busy)
        for step in plan.delete_steps if deletes else ():
            storage.delete_step(step)
            reach(CrashPoint.STEP_DELETED)
            self._known.pop(step, None)
        newest_first = [one.step for one in committed]
        oldest_kept = min(newest_first[: self._policy.keep], default=0)
        for folder in plan.sweep:
            self._sweep(folder, now_s=now_s, oldest_kept=oldest_kept)
        drop_expired_leases(storage, now_s=now_s)
        for one in storage.unfinished():
            if one.begun_at_s is not None and now_s - one.begun_at_s > self._grace_s:
                logger.info("unfinished file discarded: %s %s", storage.url, one.path)
                storage.discard(one)
        reach(CrashPoint.CLEANED)

    def _now_s(self) -> float:
        """The store's time, which does not run ahead of ours when somebody sets its clock.

        What is being written and read would have an age of hours all at once, and be deleted.
        """
        now_s, ours_s = self._storage.now_s(), time.monotonic()
        if self._looked_s is not None:
            before_s, ours_before_s = self._looked_s
            now_s = min(now_s, before_s + _MOST_RATE * (ours_s - ours_before_s) + _MOST_LEAP_S)
        self._looked_s = (now_s, ours_s)
        return now_s

    def _sweep(self, folder: AttemptFolder, *, now_s: float, oldest_kept: int) -> None:
        name = names.attempt_folder(folder.step, folder.attempt)
        files = self._storage.entries(name) + self._storage.entries(f"{name}/{names.PARTS}")
        if is_abandoned(
            folder,
            written_at_s=[entry.written_at_s for entry in files if not entry.is_folder],
            now_s=now_s,
            grace_s=self._grace_s,
            oldest_kept=oldest_kept,
        ):
            logger.info("remains of an upload deleted: %s %s", self._storage.url, name)
            self._storage.delete_folder(name)
            reach(CrashPoint.REMAINS_DELETED)

    def _read_new(self) -> None:
        """Know the records of all that is committed, and of nothing else."""
        steps = self._storage.committed_steps()
        self._known = {
            step: known
            if (known := self._known.get(step)) and known.attempt is not None
            else self._read(step)
            for step in steps
        }

    def _over(self, waiting: Collection[tuple[int, int]]) -> tuple[list[int], bool]:
        """Steps that are given up; and whether a choice may still fail, which gives up nothing.

        An attempt that has made a state has loaded what was chosen before it.
        """
        known = {step: one.attempt for step, one in self._known.items() if one.attempt is not None}
        newest = max([*known.values(), *(attempt for _, attempt in waiting)], default=0)
        in_force = [each for each in self._chosen if newest > each.attempt]
        over = [step for step, attempt in known.items() if is_given_up(in_force, step, attempt)]
        return over, len(in_force) < len(self._chosen)

    def _committed(self, now_s: float) -> list[CommittedStep]:
        """What exists, newest first."""
        pinned = pinned_steps(self._storage)
        leased = leased_steps(self._storage, now_s=now_s)
        return [
            replace(known, is_pinned=step in pinned, is_read=step in leased)
            for step, known in self._known.items()
        ]

    def _read(self, step: int) -> CommittedStep:
        try:
            commit, manifest = self._storage.read_commit(step)
        except CorruptCheckpointError as error:
            logger.warning("checkpoint not counted among the newest: %s", error)
            return CommittedStep(step=step, attempt=None)
        return CommittedStep(step=step, attempt=commit.attempt, metric=metric_of(manifest))


def metric_of(manifest: Manifest) -> float | None:
    """Held-out loss when the checkpoint was made; None where there was no evaluation yet."""
    try:
        extra = json.loads(manifest.parts[0].extra)
        return float(extra["evaluation"]["loss"])
    except (ValueError, KeyError, TypeError):
        return None


def attempt_folders(storage: Storage) -> list[AttemptFolder]:
    """Folders of all attempts, committed or not, by step and attempt."""
    parsed = sorted(
        found
        for entry in storage.entries("")
        if entry.is_folder and (found := names.parse_attempt_folder(entry.name)) is not None
    )
    return [AttemptFolder(step=step, attempt=attempt) for step, attempt in parsed]


def committed_by(storage: Storage, step: int) -> int:
    """The attempt whose checkpoint of `step` is committed.

    Where the record of that cannot be read, it is the newest that has a folder of the step.
    """
    try:
        return CommitRecord.from_json(storage.read_bytes(names.commit_path(step))).attempt
    except (RecordError, FileNotFoundError):
        folders = (folder.attempt for folder in attempt_folders(storage) if folder.step == step)
        return max(folders, default=0)


def quarantined(storage: Storage) -> set[tuple[int, int]]:
    """Step and attempt of checkpoints that were found corrupt."""
    found = (names.parse_quarantined(entry.name) for entry in storage.entries(names.QUARANTINE))
    return {parsed for parsed in found if parsed is not None}
