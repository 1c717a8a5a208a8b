"""The workers of this node, from the request to fork them until they are forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class WorkerKey(NamedTuple):
    """A rank of an attempt: one worker at most."""

    job_id: str
    attempt: int
    rank: int


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerState:
    """What is known of a worker. It runs until it is known to have ended.

    One that is kept has left its attempt, which is an end, and its process lives.
    """

    key: WorkerKey
    pid: int | None = None
    is_running: bool = True
    is_kept: bool = False
    completed_step: int = -1
    # Of the event that reports its end.
    end_seq: int | None = None


def taken_over(
    kept: Iterable[WorkerKey], starting: Iterable[WorkerKey]
) -> dict[WorkerKey, WorkerKey]:
    """Which of the processes that were kept goes on as which worker that is about to start.

    One of the same rank, or else, where a job goes on at another size, of a rank that is not
    started here.
    """
    ours = list(kept)
    taken: dict[WorkerKey, WorkerKey] = {}
    wanting = list(starting)
    for is_same in (True, False):
        for key in wanting:
            if key in taken:
                continue
            free = (
                each
                for each in ours
                if each.job_id == key.job_id and (each.rank == key.rank or not is_same)
            )
            if (found := next(free, None)) is not None:
                taken[key] = found
                ours.remove(found)
    return taken


class WorkerTable:
    """Workers by key, in the order of their starts."""

    def __init__(self) -> None:
        self._workers: dict[WorkerKey, WorkerState] = {}

    def request(self, keys: Iterable[WorkerKey]) -> None:
        """Workers are about to be forked."""
        for key in keys:
            self._workers[key] = WorkerState(key=key)

    def forked(self, key: WorkerKey, pid: int) -> None:
        """There is a process."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.pid = pid

    def not_forked(self, key: WorkerKey) -> None:
        """There was never a process, and nothing of it is kept."""
        worker = self._workers.pop(key, None)
        if worker is not None:
            worker.is_running = False

    def ended(self, key: WorkerKey, completed_step: int, *, is_kept: bool = False) -> bool:
        """A process ended, or left its attempt; whether that is news."""
        worker = self._workers.get(key)
        if worker is None or not worker.is_running:
            return False
        worker.is_running = False
        worker.is_kept = is_kept
        worker.completed_step = completed_step
        return True

    def kept_ended(self, key: WorkerKey) -> bool:
        """The process of one that was kept is no more, or another worker's; whether it is news."""
        worker = self._workers.get(key)
        if worker is None or not worker.is_kept:
            return False
        worker.is_kept = False
        return True

    def end_reported(self, key: WorkerKey, seq: int) -> None:
        """An event says that the process ended."""
        worker = self._workers.get(key)
        if worker is not None:
            worker.end_seq = seq

    def end_seq(self, key: WorkerKey) -> int | None:
        """The number of the event that reports the end of a worker; None while there is none."""
        worker = self._workers.get(key)
        return None if worker is None else worker.end_seq

    def is_over(self, job_id: str, attempt: int) -> bool:
        """Whether no worker of an attempt runs here."""
        return not any(
            worker.is_running
            for key, worker in self._workers.items()
            if (key.job_id, key.attempt) == (job_id, attempt)
        )

    def up_to(self, job_id: str, attempt: int) -> tuple[WorkerState, ...]:
        """The workers of an attempt and of older ones, dead ones as well."""
        return tuple(
            worker
            for key, worker in self._workers.items()
            if key.job_id == job_id and key.attempt <= attempt
        )

    def kept(self) -> tuple[WorkerState, ...]:
        """Those that have left their attempt, of all jobs."""
        return tuple(worker for worker in self._workers.values() if worker.is_kept)

    def in_the_way_of(self, job_id: str, attempt: int) -> tuple[WorkerState, ...]:
        """What may not live beside an attempt: older ones of its job, and the kept of others."""
        others = tuple(worker for worker in self.kept() if worker.key.job_id != job_id)
        return self.up_to(job_id, attempt - 1) + others

    def alive(self) -> list[WorkerKey]:
        """Those that have a process: they run, or are kept."""
        return [key for key, worker in self._workers.items() if worker.is_running or worker.is_kept]

    def forget_dead(self, job_id: str, *, below_attempt: int | None = None) -> list[WorkerKey]:
        """Drop the dead workers of a job, or only those of attempts before `below_attempt`."""
        dead = [
            key
            for key, worker in self._workers.items()
            if key.job_id == job_id
            and not worker.is_running
            and not worker.is_kept
            and (below_attempt is None or key.attempt < below_attempt)
        ]
        for key in dead:
            del self._workers[key]
        return dead
