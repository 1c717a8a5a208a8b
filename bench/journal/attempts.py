"""What one attempt writes: from a fault until every node's ranks train again.

The production service and journal in one process (`bench.bare_controller`); nodes are answers,
without gRPC. A rank is killed, all others lose their connections, every node stops its ranks and
starts them anew. Times are CPU time of this process: the loop, the journal and what answers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.bare_controller import Bench, controller
from bench.controller.fleet import JOB, WORKERS, answer, first_steps, join, submit
from controller.core import events as ev
from controller.core.batches import compacted
from controller.core.changes import StateChange
from controller.core.node_events import WorkerExited
from controller.core.states import JobState
from controller.store.journal import encoded
from outlast.failures import FailureClass
from outlast.ids import Attempt, NodeId
from outlast.v1 import agents_pb2

NUM_ATTEMPTS = 3
STEPS = 100_000


class Written:
    """Bytes of the rows that the journal has written since the last look."""

    def __init__(self, bench: Bench) -> None:
        self.by_kind: Counter[str] = Counter()
        self._cpu_s = time.process_time()
        append = bench.journal.append

        def counting(changes: Sequence[StateChange]) -> None:
            for change in compacted(changes):
                self.by_kind[type(change).__name__] += len(encoded(change))
            append(changes)

        bench.journal.append = counting  # type: ignore[method-assign]  # only counts

    def take(self) -> tuple[int, float]:
        """Bytes and CPU seconds since the last look."""
        now_s = time.process_time()
        found = (sum(self.by_kind.values()), now_s - self._cpu_s)
        self.by_kind.clear()
        self._cpu_s = time.process_time()
        return found


def exited(rank: int, attempt: int, failure: FailureClass, code: int, step: int) -> WorkerExited:
    """The end of a rank as its agent reports it."""
    return WorkerExited(
        job_id=JOB,
        attempt=Attempt(attempt),
        node=NodeId(f"node-{rank // WORKERS:05d}"),
        rank=rank,
        code=code,
        fault_class=failure,
        fingerprint="",
        detail="killed by SIGKILL" if code < 0 else f"lost its connection to rank {rank - 1}",
        traceback="",
        completed_step=step,
        at_s=time.time(),
    )


async def attempts(folder: Path, num_nodes: int) -> dict[str, Any]:
    """One size: the first start, attempts after faults, checkpoints, and the job's end."""
    async with controller(folder) as bench:
        written = Written(bench)
        await join(bench, num_nodes)
        await submit(bench, num_nodes)
        await answer(bench)
        await first_steps(bench, num_nodes)
        start = written.take()
        found = [await _attempt(bench, written, num_nodes, n + 2) for n in range(NUM_ATTEMPTS)]
        stored = [await _checkpoint(bench, written, 1_000 + n) for n in range(NUM_ATTEMPTS)]
        await _end(bench, num_nodes)
        end = written.take()
        job = bench.service.state.jobs[JOB]
        assert job.state is JobState.SUCCEEDED, f"the job is {job.state}: {job.reason}"
    return {
        "nodes": num_nodes,
        "ranks": num_nodes * WORKERS,
        "start_bytes": start[0],
        "start_s": start[1],
        "attempt_bytes": median(size for size, _ in found),
        "attempt_s": median(took_s for _, took_s in found),
        "checkpoint_bytes": median(stored),
        "end_bytes": end[0],
        "end_s": end[1],
    }


async def _attempt(
    bench: Bench, written: Written, num_nodes: int, attempt: int
) -> tuple[int, float]:
    written.take()
    step = 10 * attempt
    # Another node each time: where fault follows fault, nodes are checked first.
    killed = attempt % num_nodes
    first = exited(killed * WORKERS, attempt - 1, FailureClass.KILLED_BY_SIGNAL, -9, step)
    bench.service.offer([first])
    for node in range(num_nodes):
        if node == killed:
            continue
        ranks = range(node * WORKERS, (node + 1) * WORKERS)
        bench.service.offer(
            [exited(rank, attempt - 1, FailureClass.CASCADE, 1, step) for rank in ranks]
        )
        if node % 32 == 0:
            # They do not all come in the same moment.
            await asyncio.sleep(0)
    await bench.service.tell()
    await answer(bench)
    loop = asyncio.get_running_loop()
    for number in range(num_nodes):
        made = agents_pb2.AgentEvent(
            job_id=JOB,
            attempt=attempt,
            progress=agents_pb2.ProgressMade(completed_step=step + 1, resumed_step=step - 5),
        )
        node_id = NodeId(f"node-{number:05d}")
        message = agents_pb2.AgentMessage(event=made)
        bench.service.offer(bench.edge.handle(node_id, message, loop.time()))
    # As a checkpoint does, which also gives the retries back.
    await bench.service.tell(
        ev.CheckpointCommitted(job_id=JOB, step=step + 1, attempt=attempt, saved_by=attempt)
    )
    job = bench.service.state.jobs[JOB]
    running = (JobState.RUNNING, attempt)
    assert (job.state, job.attempt) == running, f"{job.state}, attempt {job.attempt}: {job.reason}"
    return written.take()


async def _checkpoint(bench: Bench, written: Written, step: int) -> int:
    written.take()
    attempt = bench.service.state.jobs[JOB].attempt
    await bench.service.tell(
        ev.CheckpointCommitted(job_id=JOB, step=step, attempt=attempt, saved_by=attempt)
    )
    return written.take()[0]


async def _end(bench: Bench, num_nodes: int) -> None:
    attempt = bench.service.state.jobs[JOB].attempt
    bench.service.offer(
        [ev.CheckpointCommitted(job_id=JOB, step=STEPS, attempt=attempt, saved_by=attempt)]
    )
    for node in range(num_nodes):
        ranks = range(node * WORKERS, (node + 1) * WORKERS)
        bench.service.offer([exited(r, attempt, FailureClass.NONE, 0, STEPS) for r in ranks])
        if node % 32 == 0:
            await asyncio.sleep(0)
    await bench.service.tell()
    await answer(bench)
