"""Steps of the trainer itself while an upload is under way, beside steps without one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from bench.checkpoint.savers import Ours
from bench.member import Rank
from outlast.blackbox import Writer
from trainer.worker.loop import TrainLoop
from trainer.worker.state import TrainState

# The upload takes about ten steps so; of a whole core, what it needs is a few percent.
BYTES_PER_S = 150e6
_STEPS_ASIDE = 4


def beside_upload(
    rank: Rank, state: TrainState, ours: Ours, *, rounds: int
) -> dict[str, list[float]]:
    """Mean seconds of a step, round by round: before and after an upload, and during it."""
    torch.set_num_threads(1)
    ours.upload_to(f"file://{rank.folder}/budgeted/job-1", bytes_per_s=BYTES_PER_S)
    box = Writer(rank.folder / "blackbox", rank=0, world_size=1, attempt=1)
    loop = TrainLoop(state, box, ours.stager, stop_requested=lambda: False)
    steps = _Steps(loop)
    steps.make(_STEPS_ASIDE)
    found: dict[str, list[float]] = {"without": [], "during": []}
    for _ in range(rounds):
        before = steps.make(_STEPS_ASIDE)
        ours.save()
        during = steps.make_until(lambda: ours.is_durable)
        ours.settle()
        after = steps.make(_STEPS_ASIDE)
        found["without"].append(statistics.mean(before + after))
        found["during"].append(statistics.mean(during))
    return found


class _Steps:
    """Makes steps, and tells what each took."""

    def __init__(self, loop: TrainLoop) -> None:
        self._loop = loop
        self._step = 0

    def make(self, count: int) -> list[float]:
        return [self._one() for _ in range(count)]

    def make_until(self, is_over: Callable[[], bool]) -> list[float]:
        """One at least."""
        times = [self._one()]
        while not is_over():
            times.append(self._one())
        return times

    def _one(self) -> float:
        self._step += 1
        begin_s = time.perf_counter()
        self._loop.train_step(self._step)
        return time.perf_counter() - begin_s
