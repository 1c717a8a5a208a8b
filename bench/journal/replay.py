"""A journal of 54 days, and how long a controller that starts takes to read it.

The length and the number of faults are those of Llama 3's pre-training (419 unexpected
interruptions in 54 days); a checkpoint is stored every 100 s. The production machine and journal
decide and write it, with snapshots as in production. It is read in the worst moment: right
before the next snapshot.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.controller.fleet import JOB, WORKERS, spec_of_all
from controller.convert import plan_of
from controller.core import events as ev
from controller.core.changes import StateChange
from controller.core.effects import Effect, Persist, SendCommand
from controller.core.machine import Machine
from controller.core.node_events import NodeJoined, WorkerExited
from controller.core.orders import RunSuite
from controller.core.states import JobState
from controller.store.database import Database
from controller.store.journal import Journal
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import Attempt, NodeId

DAYS = 54
NUM_FAULTS = 419
CHECKPOINT_EVERY_S = 100.0
# So many events share a commit when all nodes answer.
COMMIT_EVENTS = 256
# Of the ranks that lose a connection the first are kept as evidence.
NUM_CASCADES = 64


class _Clock:
    """The time of the simulated days."""

    def __init__(self) -> None:
        self.at_s = 1_700_000_000.0

    def now_s(self) -> float:
        return self.at_s


class _Controller:
    """The machine and its journal, without a loop."""

    def __init__(self, journal: Journal, clock: _Clock) -> None:
        self.journal = journal
        self.machine = Machine(journal.load())
        self.num_snapshots = 0
        self._clock = clock
        self._orders: list[SendCommand] = []

    @property
    def now_s(self) -> float:
        return self._clock.at_s

    def handle(self, *events: ev.Event) -> None:
        """Take events in, a commit for each few of them."""
        for first in range(0, len(events), COMMIT_EVENTS):
            changes: list[StateChange] = []
            for event in events[first : first + COMMIT_EVENTS]:
                self._take(self.machine.handle(event, self._clock.at_s), changes)
            if changes:
                self.journal.append(changes)

    def answer(self) -> None:
        """Every node does what it was told."""
        while self._orders:
            orders, self._orders = self._orders, []
            self.wait(5.0)
            self.handle(*map(_answer, orders))

    def wait(self, seconds: float) -> None:
        self._clock.at_s += seconds

    def compact(self) -> None:
        if self.journal.snapshot_is_due():
            self.num_snapshots += 1
            self.journal.write_snapshot(self.machine.state)

    def _take(self, effects: list[Effect], changes: list[StateChange]) -> None:
        for effect in effects:
            if isinstance(effect, Persist):
                changes += effect.changes
            elif isinstance(effect, SendCommand):
                self._orders.append(effect)


def _answer(order: SendCommand) -> ev.CommandFinished:
    command = order.command
    return ev.CommandFinished(
        command_id=command.command_id,
        node=command.node,
        ok=True,
        verdict="pass" if isinstance(command.command, RunSuite) else "",
        detail="",
        error_kind=ErrorKind.NONE,
        completed_step=-1,
    )


def replay(folder: Path, num_nodes: int) -> dict[str, Any]:
    """Write 54 days, then read what is there."""
    path = folder / "journal.sqlite"
    clock = _Clock()
    begun_s = time.perf_counter()
    with closing(Database(path)) as database:
        journal = Journal(database, clock)
        journal.take_over()
        controller = _Controller(journal, clock)
        _begin(controller, num_nodes)
        num_faults, checkpoints = _live(controller, num_nodes)
    written_s = time.perf_counter() - begun_s
    with closing(Database(path)) as database:
        reader = Journal(database, clock)
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        loaded = reader.load()
        took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    assert loaded == controller.machine.state, "what is read is not what was decided"
    return {
        "days": DAYS,
        "nodes": num_nodes,
        "faults": num_faults,
        "checkpoints": checkpoints,
        "snapshots": controller.num_snapshots,
        "written_s": written_s,
        "file_bytes": path.stat().st_size,
        "read_bytes": reader.num_bytes,
        "replay_s": took_s,
        "replay_cpu_s": cpu_s,
    }


def _live(controller: _Controller, num_nodes: int) -> tuple[int, int]:
    """Go through the days, and on until a snapshot is due; faults and checkpoints of them."""
    checkpoints = int(DAYS * 86_400 / CHECKPOINT_EVERY_S)
    fault_at = {round((n + 1) * checkpoints / (NUM_FAULTS + 1)) for n in range(NUM_FAULTS)}
    stored = 0
    for number in range(1, checkpoints + 1):
        controller.wait(CHECKPOINT_EVERY_S)
        if number in fault_at or number == checkpoints:
            _store(controller, range(stored + 1, number + 1))
            stored = number
        if number in fault_at:
            controller.compact()
            _fail(controller, num_nodes, number)
    num_faults = NUM_FAULTS
    while not controller.journal.snapshot_is_due():
        # As far apart as before: a node is not to blame for two faults of different days.
        controller.wait(DAYS * 86_400 / NUM_FAULTS)
        checkpoints += 1
        num_faults += 1
        _store(controller, range(checkpoints, checkpoints + 1))
        _fail(controller, num_nodes, checkpoints)
    return num_faults, checkpoints


def _begin(controller: _Controller, num_nodes: int) -> None:
    spec = spec_of_all(num_nodes)
    controller.handle(ev.ControllerStarted(term=1))
    for number in range(num_nodes):
        controller.handle(
            NodeJoined(
                node=NodeId(f"node-{number:05d}"),
                incarnation="one",
                address=f"10.0.{number // 256}.{number % 256}",
                rendezvous_port=29500,
                workers=WORKERS,
                statuses=(),
            )
        )
    controller.handle(
        ev.JobSubmitted(
            job_id=JOB,
            name=spec.name,
            request_id="bench",
            spec_json=spec.canonical_json(),
            checkpoint_url="file:///checkpoints",
            plan=plan_of(spec),
        )
    )
    controller.answer()
    _advance(controller, 1, 0)


def _store(controller: _Controller, steps: range) -> None:
    """Checkpoints between two faults: as many rows as events, in fewer commits."""
    attempt = controller.machine.state.jobs[JOB].attempt
    controller.handle(
        *(
            ev.CheckpointCommitted(job_id=JOB, step=step, attempt=attempt, saved_by=attempt)
            for step in steps
        )
    )


def _fail(controller: _Controller, num_nodes: int, step: int) -> None:
    """A rank of some node is killed, others lose it, and all start anew."""
    attempt = controller.machine.state.jobs[JOB].attempt
    # Another node each time: one on which fault follows fault is checked, or replaced.
    killed = attempt % num_nodes * WORKERS
    others = (rank for rank in range(num_nodes * WORKERS) if rank // WORKERS != killed // WORKERS)
    cascades = [rank for rank, _ in zip(others, range(NUM_CASCADES), strict=False)]
    at_s = controller.now_s
    # Suspicion of the last fault's node is over.
    controller.handle(ev.TimePassed())
    controller.handle(_exit(killed, attempt, FailureClass.KILLED_BY_SIGNAL, step, at_s))
    controller.handle(
        *(_exit(rank, attempt, FailureClass.CASCADE, step, at_s) for rank in cascades)
    )
    controller.answer()
    _advance(controller, step + 1, step)


def _exit(
    rank: int, attempt: Attempt, failure: FailureClass, step: int, at_s: float
) -> WorkerExited:
    is_killed = failure is FailureClass.KILLED_BY_SIGNAL
    return WorkerExited(
        job_id=JOB,
        attempt=attempt,
        node=NodeId(f"node-{rank // WORKERS:05d}"),
        rank=rank,
        code=-9 if is_killed else 1,
        fault_class=failure,
        fingerprint="",
        detail="killed by SIGKILL" if is_killed else f"lost its connection to rank {rank - 1}",
        traceback="",
        completed_step=step,
        at_s=at_s,
    )


def _advance(controller: _Controller, step: int, resumed_step: int) -> None:
    job = controller.machine.state.jobs[JOB]
    controller.handle(
        ev.JobAdvanced(
            job_id=JOB,
            attempt=job.attempt,
            completed_step=step,
            resumed_step=resumed_step,
            at_s=controller.now_s,
        )
    )
    job = controller.machine.state.jobs[JOB]
    assert job.state is JobState.RUNNING, f"the job is {job.state}: {job.reason}"
