"""Training loops that stand in for training beside a save, and what a save costs them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from bench.checkpoint.savers import Saver


class Loop(Protocol):
    """One step takes some milliseconds."""

    def step(self) -> None: ...


class Launching:
    """One Python thread that issues many tiny operations, as one does that feeds a device.

    It needs the interpreter all the time and the memory hardly.
    """

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._tensors = [torch.zeros(16) for _ in range(64)]

    def step(self) -> None:
        for _ in range(40):
            for tensor in self._tensors:
                tensor.add_(1.0)


class Computing:
    """Matrix products on every core: whatever else runs takes their time."""

    def __init__(self, num_cores: int) -> None:
        torch.set_num_threads(num_cores)
        self._x = torch.randn(256, 1024)
        self._weights = [torch.randn(1024, 1024) * 0.02 for _ in range(4)]

    def step(self) -> None:
        x = self._x
        for weight in self._weights:
            x = torch.relu(x @ weight)


def steps_lost(loop: Loop, aside_s: float, saver: Saver) -> float:
    """Steps that were not made, from the save until it is durable.

    The pace without a save is that of `aside_s` before and as long after.
    """
    before = _run(loop, _for(aside_s))
    begin_s = time.perf_counter()
    saver.save()
    num_steps = len(_run(loop, lambda: saver.is_durable))
    took_s = time.perf_counter() - begin_s
    saver.settle()
    after = _run(loop, _for(aside_s))
    return took_s / statistics.mean(before + after) - num_steps


def _for(seconds: float) -> Callable[[], bool]:
    end_s = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end_s


def _run(loop: Loop, is_over: Callable[[], bool]) -> list[float]:
    """Seconds of each step until it is over, and of one at least."""
    times: list[float] = []
    while not times or not is_over():
        begin_s = time.perf_counter()
        loop.step()
        times.append(time.perf_counter() - begin_s)
    return times
