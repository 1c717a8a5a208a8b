"""Looks at local ranks a few times a second, and says at once when one stands for too long.

The black boxes say where the ranks are, the kernel whether they are run at all. What is
too long is learned (`diagnostics.core.pace`). Of a script that reports nothing in its box,
signs of life say whether it moves. A rank that crosses its limit, or moves again, has a
heartbeat sent now; healthy ones cost nothing.

What does not belong here: deciding that the job hangs. One rank proves nothing, and the
controller hears of all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from controller.agent.observe.signs_of_life import SignsOfLife
from controller.agent.workers.processes import process_state
from controller.agent.workers.worker import Worker
from diagnostics.core.pace import STOPPED_STATE, Look, Pace, Stall
from outlast.blackbox import Op, Phase, Present, Reader
from outlast.v1 import agents_pb2

LOOK_PERIOD_S = 0.2
# Less is no news to anyone.
_WORTH_TELLING_S = 1.0


class StallWatch:
    """How every local rank stands."""

    def __init__(self, workers: Callable[[], list[Worker]], crossed: Callable[[], None]) -> None:
        self._workers = workers
        self._crossed = crossed
        # What is learned outlives an attempt.
        self._paces: dict[tuple[str, int], tuple[int, Pace]] = {}
        self._stalls: dict[str, Stall] = {}
        self._signs = SignsOfLife()

    async def run(self) -> None:
        """Look for as long as the agent lives."""
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(LOOK_PERIOD_S)

    def look(self, now_s: float) -> None:
        """Look at every rank once."""
        workers = self._workers()
        over = self._keys_over()
        running = [worker for worker in workers if worker.is_running]
        self._stalls = dict(self._look_at(running, now_s))
        self._signs.keep_only(running)
        if self._keys_over() != over:
            self._crossed()
        jobs = {worker.job_id for worker in workers}
        for key in [key for key in self._paces if key[0] not in jobs]:
            del self._paces[key]

    def describe(self, worker: Worker, summary: agents_pb2.RankSummary) -> None:
        """Add to a rank's summary how it stands, when that is worth telling."""
        stall = self._stalls.get(worker.key)
        stands = stall is not None and stall.stalled_s >= _WORTH_TELLING_S
        # A script's summary always says whether it has reported anything.
        present = worker.present() if stands or worker.is_script else None
        if present is None:
            return
        summary.reports_no_steps = _reports_nothing(worker, present)
        if stall is None or not stands:
            return
        summary.stalled_s = stall.stalled_s
        summary.stall_limit_s = stall.limit_s or 0.0
        summary.stall_limit_source = stall.source
        for group, seq in present.entered.items():
            summary.entered[group.name.lower()] = seq
        if worker.pid is not None:
            summary.process_state = process_state(worker.pid)

    def _keys_over(self) -> list[str]:
        return [key for key, stall in self._stalls.items() if stall.is_over]

    def _look_at(self, workers: Iterable[Worker], now_s: float) -> Iterable[tuple[str, Stall]]:
        for worker in workers:
            if worker.pid is not None:
                before = self._stalls.get(worker.key)
                # Of one that moves, the kernel need not be asked.
                stands = before is not None and before.unchanged_s >= _WORTH_TELLING_S
                is_stopped = stands and process_state(worker.pid) == STOPPED_STATE
                look = worker.look(partial(self._look, worker, now_s, is_stopped))
                if look is not None:
                    yield worker.key, self._pace_of(worker).look(look)

    def _look(self, worker: Worker, now_s: float, is_stopped: bool, reader: Reader) -> Look:
        assert worker.pid is not None
        present = reader.present()
        place: tuple[int, ...] = (
            present.completed_step,
            present.phase,
            present.phase_since_ns,
            present.group,
            present.op_seq,
            present.op_left_ns,
        )
        is_silent = _reports_nothing(worker, present)
        num_moves = 0
        if is_silent or present.phase is Phase.STEP:
            num_moves = self._signs.num_moves(worker, now_s)
        if is_silent:
            place = (*place, num_moves)
        return Look(
            at_s=now_s,
            place=place,
            phase=present.phase,
            num_steps=max(0, present.completed_step - max(0, present.resumed_step)),
            phases_s=reader.time_use().phases_s,
            starved_s=_starved_s(worker.pid),
            is_stopped=is_stopped,
            silent_limit_s=worker.silent_limit_s if is_silent else None,
            num_moves=num_moves,
        )

    def _pace_of(self, worker: Worker) -> Pace:
        key = (worker.job_id, worker.rank)
        attempt, pace = self._paces.get(key, (worker.attempt, Pace()))
        if attempt != worker.attempt:
            pace.restarted()
        self._paces[key] = (worker.attempt, pace)
        return pace


def _reports_nothing(worker: Worker, present: Present) -> bool:
    """Whether it is a script that has reported neither a step of its own nor an operation."""
    has_stepped = present.completed_step > max(0, present.resumed_step)
    return worker.is_script and not has_stepped and present.op is Op.NONE


def _starved_s(pid: int) -> float:
    """Seconds so far in which the process's main thread could run and had no CPU.

    0.0 where the kernel does not count it.
    """
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
