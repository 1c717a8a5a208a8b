"""What a job has behind it: two weeks of steps, attempts, checkpoints, incidents, days of nodes.

What pages ask of it is measured, and an empty job has next to nothing to send.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.bare_controller import Bench
from bench.controller.fleet import JOB
from controller.core.changes import JobPut
from controller.core.events import Detected
from controller.core.kinds import Cause
from controller.core.states import JobState
from controller.store.curves import StepRow
from controller.store.history import CommitRow
from controller.store.trends import DAY_S
from diagnostics.core.node_days import NodeDay
from outlast.ids import Attempt
from outlast.v1 import common_pb2

_PARTS = tuple(field.name for field in common_pb2.StepSplit.DESCRIPTOR.fields)
_STATES = (
    *(JobState.PROVISIONING, JobState.PREFLIGHT, JobState.STARTING),
    *(JobState.RUNNING, JobState.SUSPENDING, JobState.DIAGNOSING),
)
_EVAL_STEPS, _SAVE_STEPS = 50, 100
# Of a step: as many as come to two weeks.
_STEP_S = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """How much there is of it."""

    steps: int = 100_000
    attempts: int = 40
    incidents: int = 300


async def fill(bench: Bench, past: Past) -> None:
    """Give the job that trains this past."""
    service = bench.service
    job = service.state.jobs[JOB]
    begun_s = service.now_s - _STEP_S * past.steps
    service.curves.take(_rows(past, begun_s))
    service.curves.flush()
    of_attempt_s = _STEP_S * past.steps / past.attempts
    for attempt in range(1, past.attempts + 1):
        at_s = begun_s + (attempt - 1) * of_attempt_s
        for number, state in enumerate(_STATES):
            moved = replace(
                job,
                state=state,
                attempt=Attempt(attempt),
                since_s=at_s + 20.0 * number,
                reason="node-00007 was lost: no heartbeat for 10 s",
            )
            service.history.take([JobPut(job=moved)])
    service.history.take([JobPut(job=job)])
    for step in range(_SAVE_STEPS, past.steps + 1, _SAVE_STEPS):
        at_s = begun_s + _STEP_S * step
        row = CommitRow(job=JOB, step=step, attempt=1, at_s=at_s, size_bytes=1_234_567_890 + step)
        service.history.committed(row)
    service.history.flush()
    await bench.trends.read()
    _days(bench)
    await _incidents(bench, past)


def _rows(past: Past, begun_s: float) -> Iterator[StepRow]:
    """A curve as real ones are: it falls, with noise in every column."""
    draw = random.Random(1).gauss
    for step in range(1, past.steps + 1):
        loss = 2 + 9 * step**-0.3 + draw(0, 0.03)
        learning_rate = 1.5e-4 * (1 + math.cos(math.pi * step / past.steps))
        yield StepRow(
            job=JOB,
            step=step,
            attempt=1,
            loss=loss,
            grad_norm=abs(draw(0.7, 0.1)),
            learning_rate=learning_rate,
            tokens=4_194_304,
            duration_s=_STEP_S + draw(0, 0.2),
            at_s=begun_s + _STEP_S * step + draw(0, 0.1),
            eval_loss=loss + draw(0.05, 0.005) if step % _EVAL_STEPS == 0 else None,
            split=common_pb2.StepSplit(**{part: abs(draw(1, 0.1)) for part in _PARTS}),
        )


def _days(bench: Bench) -> None:
    draw = random.Random(2).gauss
    days = {
        node: NodeDay(
            num_windows=1000,
            num_slowest=abs(round(draw(1, 1))),
            expected_slowest=1.0,
            ratios=abs(draw(1020, 5)),
            lasts=abs(draw(1, 0.5)),
            service_s=DAY_S,
        )
        for node in bench.service.state.nodes
    }
    bench.trend_store.add_days(days, int(bench.service.now_s // DAY_S))


async def _incidents(bench: Bench, past: Past) -> None:
    """Notes, each of another node: lists have them in brief, as faults."""
    service = bench.service
    nodes = list(service.state.nodes)
    causes = (Cause.KERNEL_LOG, Cause.DISK, Cause.HOST_MEMORY, Cause.NODE_CONDITION)
    found = [
        Detected(
            job_id=JOB,
            attempt=service.state.jobs[JOB].attempt,
            cause=causes[number // len(nodes) % len(causes)],
            node=(node := nodes[number % len(nodes)]),
            rank=None,
            detail=f"{node}: the kernel has logged {number} corrected errors of GPU {number % 8}; "
            "its limit is 3 within an hour",
            at_s=service.now_s - number,
        )
        for number in range(past.incidents)
    ]
    await service.tell(*found)
