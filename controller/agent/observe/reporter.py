"""Reads the black boxes of local workers and says upward what they hold.

Three things leave here: a summary of every rank for the heartbeat; the figures
of every step, from rank 0's box (all ranks know the same loss); and the progress
of the attempt on this node with what its start took, which the controller needs at
once after a start, in each new session and at the end.

What does not belong here: when progress is due (`core/reports`), and the end of
workers. Only the last look into their boxes does.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from controller.agent.core.buffer import Weight
from controller.agent.core.reports import LAST_STEPS_S, AttemptKey, Reports
from controller.agent.observe.leftovers import LeftSteps
from controller.agent.observe.steps import LastSteps, mean_split
from controller.agent.workers.worker import EnvironmentNote, Worker, read_environment
from controller.operations import set_operation
from outlast.blackbox import NUM_STEP_RECORDS, Phase, Reader, StartMark, StepRecord
from outlast.clock import node_time_ns, node_time_s
from outlast.v1 import agents_pb2, common_pb2

# Parts of a start, each ending with the mark beside it. `fork` comes before them.
_PARTS = (
    ("groups", StartMark.GROUPS_READY),
    ("model", StartMark.MODEL_READY),
    ("restore", StartMark.RESTORED),
)

Emit = Callable[[agents_pb2.AgentEvent, Weight], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    """How far a rank is, and since when."""

    step: int
    at_ns: int


@dataclass(slots=True)
class _Rank:
    """What was read from one rank's box so far."""

    worker: Worker
    resumed_step: int = -1
    last: StepRecord | None = None
    first: StepRecord | None = None
    # Rank 0's that are in no report yet.
    fresh: list[StepRecord] = field(default_factory=list)
    # Any other rank's that rank 0's agent may not have reported yet.
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=NUM_STEP_RECORDS))
    # The rank has ended and everything it left was read.
    is_read: bool = False
    last_steps: LastSteps = field(default_factory=LastSteps)

    def standing(self) -> _Standing | None:
        """How far it is; None before its first step.

        A script need not say anything of its steps: it is at step 0 from the moment it runs.
        """
        if self.last is not None:
            return _Standing(step=self.last.step, at_ns=self.last.end_ns)
        if self.worker.is_script and self.worker.present() is not None:
            return _Standing(step=0, at_ns=self.worker.forked_ns)
        return None

    def look(self, *, is_connected: bool) -> None:
        """Take in the steps completed since the last look."""
        if self.is_read:
            return
        records = self._new_steps()
        present = self.worker.present() if records else None
        if not records or present is None:
            return
        self.worker.look(self.last_steps.look)
        self.resumed_step = present.resumed_step
        self.first = self.first or records[0]
        self.last = records[-1]
        if self.worker.rank == 0:
            self.fresh.extend(records)
            return
        self.recent.extend(records)
        since_ns = records[-1].end_ns - LAST_STEPS_S * 1e9
        while is_connected and self.recent[0].end_ns < since_ns:
            self.recent.popleft()

    def _new_steps(self) -> list[StepRecord]:
        """Those that the job has: after one beyond them, no true one would count as progress."""
        found = self.worker.look(Reader.new_steps) or []
        records = [record for record in found if record.step <= self.worker.total_steps]
        if len(records) < len(found):
            most = max(record.step for record in found)
            error = ValueError(f"step {most} of {self.worker.total_steps}; left out")
            self.worker.mistakes.note("black box", self.worker.key, error)
        return records


@dataclass(slots=True)
class _Attempt:
    """Progress of one attempt on this node."""

    ranks: dict[int, _Rank] = field(default_factory=dict)
    unsent: list[common_pb2.StepReport] = field(default_factory=list)
    # What each rank said of its numeric environment; empty before the first step of all.
    _environments: list[EnvironmentNote] = field(default_factory=list)

    def look(self, attempt: int, *, is_connected: bool) -> None:
        """Take in what every rank here has completed since the last look."""
        for rank in self.ranks.values():
            rank.look(is_connected=is_connected)
        first = self.ranks.get(0)
        if first is None or not first.fresh:
            return
        reports = [_step_report(record, attempt) for record in first.fresh]
        uses = [rank.last_steps.use for rank in self.ranks.values()]
        split = mean_split([use.split for use in uses if use is not None])
        if split is not None:
            reports[-1].split.CopyFrom(split)
        self.unsent += reports
        first.fresh = []

    def environment(self) -> Mapping[str, str]:
        """What decides the bits of the arithmetic here, as the first local rank has it."""
        return self._notes()[0].environment

    def environment_changes(self) -> list[str]:
        """What is no longer as it was when the resumed state was saved, on any local rank."""
        return list(dict.fromkeys(line for note in self._notes() for line in note.changes))

    def data_left_out(self) -> tuple[str, ...]:
        """What of its data source this node does not read, as the first local rank says."""
        return self._notes()[0].left_out

    def num_samples(self) -> int:
        """Samples in the data of training, as the first local rank says; 0: not known."""
        return self._notes()[0].num_samples

    def skipped_checkpoints(self) -> tuple[tuple[int, str], ...]:
        """What the attempt could not load, if rank 0 is here: every rank says the same."""
        return self._notes()[0].skipped if 0 in self.ranks else ()

    def _notes(self) -> list[EnvironmentNote]:
        if not self._environments:
            self._environments = [
                read_environment(self.ranks[rank].worker.paths.environment)
                for rank in sorted(self.ranks)
            ]
        return self._environments


class Reporter:
    """Turns black boxes into events and heartbeat summaries."""

    def __init__(self, emit: Emit, is_connected: Callable[[], bool], reports: Reports) -> None:
        self._emit = emit
        self._is_connected = is_connected
        self._reports = reports
        self._attempts: dict[AttemptKey, _Attempt] = {}
        self._changed = asyncio.Event()

    def watch(self, workers: Iterable[Worker]) -> None:
        """Report on these workers, all ranks of one attempt on this node, from now on."""
        self._drop_ended()
        for worker in workers:
            key = AttemptKey(worker.job_id, worker.attempt)
            attempt = self._attempts.setdefault(key, _Attempt())
            attempt.ranks[worker.rank] = _Rank(worker)
            age_s = _age_s(node_time_ns(), worker.requested_ns)
            self._reports.begin(key, time.monotonic() - age_s)
        self._changed.set()

    def worker_ended(self, worker: Worker, *, is_last: bool) -> None:
        """Send what the worker still left in its box, before its end is reported.

        After the last one of its attempt here, send what all of them left.
        """
        key = AttemptKey(worker.job_id, worker.attempt)
        attempt = self._attempts.get(key)
        if attempt is None or worker.rank not in attempt.ranks:
            return
        attempt.look(key.attempt, is_connected=self._is_connected())
        attempt.ranks[worker.rank].is_read = True
        self._send_steps(key, attempt)
        if is_last:
            self._send_last_steps(key, attempt)
            self._send_progress(key, attempt, is_last=True)
            self._drop(key)

    async def run(self) -> None:
        """Look into the boxes for as long as there are any."""
        while True:
            if not self._attempts:
                self._changed.clear()
                await self._changed.wait()
            self.look(time.monotonic())
            await asyncio.sleep(self._reports.look_period_s(time.monotonic()))

    def summary(self, worker: Worker) -> agents_pb2.RankSummary:
        """What the box of this worker says now, for a heartbeat."""
        now_ns = node_time_ns()
        attempt = self._attempts.get(AttemptKey(worker.job_id, worker.attempt), _Attempt())
        rank = attempt.ranks.get(worker.rank, _Rank(worker))
        born_ns = worker.forked_ns or worker.requested_ns
        summary = agents_pb2.RankSummary(
            job_id=worker.job_id,
            attempt=worker.attempt,
            rank=worker.rank,
            phase=Phase.STARTING.name.lower(),
            completed_step=-1,
            resumed_step=-1,
            step_age_s=_age_s(now_ns, rank.last.end_ns if rank.last else born_ns),
        )
        present = worker.present()
        if present is not None:
            summary.phase = present.phase.name.lower()
            summary.completed_step = present.completed_step
            summary.resumed_step = present.resumed_step
            set_operation(summary, present.last_operation)
            since_ns = present.op_left_ns or present.op_entered_ns or born_ns
            summary.last_op_age_s = _age_s(now_ns, since_ns)
        if rank.last_steps.use is not None:
            summary.use.CopyFrom(rank.last_steps.use)
        return summary

    def _drop_ended(self) -> None:
        """Drop attempts of which no worker was ever forked."""
        for key, attempt in list(self._attempts.items()):
            if not any(rank.worker.is_running for rank in attempt.ranks.values()):
                self._drop(key)

    def _drop(self, key: AttemptKey) -> None:
        del self._attempts[key]
        self._reports.end(key)

    def look(self, now_s: float) -> None:
        """Look into every box once, and send what is new."""
        for key, attempt in self._attempts.items():
            attempt.look(key.attempt, is_connected=self._is_connected())
            if self._reports.are_steps_due(key, now_s):
                self._send_steps(key, attempt)
            self._send_progress(key, attempt)

    def _send_steps(self, key: AttemptKey, attempt: _Attempt) -> None:
        if attempt.unsent:
            self._report(key, attempt.unsent)
            attempt.unsent = []

    def _send_last_steps(self, key: AttemptKey, attempt: _Attempt) -> None:
        rank = attempt.ranks[min(attempt.ranks)]
        exit_ = rank.worker.exit
        if rank.recent and (exit_ is None or exit_.code != 0):
            self._report(key, [_step_report(each, key.attempt) for each in rank.recent])

    def report_unsent(self, left: Iterable[LeftSteps]) -> None:
        """Report steps that an agent before this one may not have reported."""
        for steps in left:
            key = AttemptKey(steps.job_id, steps.attempt)
            self._report(key, [_step_report(each, key.attempt) for each in steps.records])

    def _report(self, key: AttemptKey, reports: list[common_pb2.StepReport]) -> None:
        job_id, number = key
        event = agents_pb2.AgentEvent(
            job_id=job_id,
            attempt=number,
            at_s=node_time_s(),
            step_reports=agents_pb2.StepReports(reports=reports),
        )
        self._emit(event, Weight.STEPS)

    def _report_skipped(self, key: AttemptKey, attempt: _Attempt) -> None:
        """Say what could not be loaded. An agent that restarts says it again."""
        job_id, number = key
        for step, why in attempt.skipped_checkpoints():
            trouble = agents_pb2.CheckpointTrouble(step=step, stage="load", detail=why)
            event = agents_pb2.AgentEvent(
                job_id=job_id, attempt=number, at_s=node_time_s(), checkpoint_trouble=trouble
            )
            self._emit(event, Weight.LASTING)

    def _send_progress(self, key: AttemptKey, attempt: _Attempt, *, is_last: bool = False) -> None:
        """Say how far the slowest local rank is, if that is due."""
        slowest = _slowest(attempt)
        if slowest is None:
            return
        is_first = self._reports.is_first_progress(key)
        if not self._reports.is_progress_due(key, slowest.step, is_last=is_last):
            return
        job_id, number = key
        if is_first:
            self._report_skipped(key, attempt)
        progress = agents_pb2.ProgressMade(
            completed_step=slowest.step,
            resumed_step=min(rank.resumed_step for rank in attempt.ranks.values()),
            completed_at_s=slowest.at_ns / 1e9,
            start_split_s=_start_split(attempt),
            environment=attempt.environment(),
            environment_changes=attempt.environment_changes(),
            data_left_out=attempt.data_left_out(),
            num_samples=attempt.num_samples(),
        )
        event = agents_pb2.AgentEvent(
            job_id=job_id, attempt=number, at_s=node_time_s(), progress=progress
        )
        self._emit(event, Weight.PROGRESS)


def _slowest(attempt: _Attempt) -> _Standing | None:
    """Of the local ranks; None before each has done a step."""
    standings = [rank.standing() for rank in attempt.ranks.values()]
    known = [standing for standing in standings if standing is not None]
    if len(known) < len(standings):
        return None
    return min(known, key=lambda standing: (standing.step, -standing.at_ns))


def _age_s(now_ns: int, then_ns: int) -> float:
    return max(0.0, (now_ns - then_ns) / 1e9)


def _step_report(record: StepRecord, attempt: int) -> common_pb2.StepReport:
    return common_pb2.StepReport(
        step=record.step,
        attempt=attempt,
        loss=record.loss,
        grad_norm=record.grad_norm,
        learning_rate=record.learning_rate,
        tokens=record.tokens,
        # A clock may be set back within a step.
        duration_s=max(0, record.end_ns - record.start_ns) / 1e9,
        at_s=record.end_ns / 1e9,
        eval_loss=record.eval_loss,
        eval_losses=record.eval_losses,
    )


def _start_split(attempt: _Attempt) -> dict[str, float]:
    """Seconds of each part of the start, of the rank whose first step ended last.

    The parts add up to the time from the start command to the end of that step.
    """
    ends = [(r.first.end_ns, r.worker) for r in attempt.ranks.values() if r.first is not None]
    if not ends:
        # Of scripts that report no steps.
        workers = [rank.worker for rank in attempt.ranks.values()]
        return {"fork": max(_age_s(one.forked_ns, one.requested_ns) for one in workers)}
    first_step_ns, worker = max(ends, key=lambda end: end[0])
    marks = worker.look(Reader.marks) or {}
    split = {"fork": _age_s(worker.forked_ns, worker.requested_ns)}
    last_ns = worker.forked_ns
    for part, mark in _PARTS:
        # A mark that lies after the first step is none.
        at_ns = max(last_ns, min(first_step_ns, marks.get(mark, last_ns)))
        split[part] = (at_ns - last_ns) / 1e9
        last_ns = at_ns
    split["first_step"] = _age_s(first_step_ns, last_ns)
    return split
