"""Passes of Python's garbage collector at the same steps on all ranks.

Left to itself, each rank's collector runs when that rank has made enough objects, so in a large
job some rank pauses in almost every step and the others wait for it. Here it is off while steps
run, and every rank collects after the same ones, as often as `garbage_interval_steps` of the spec
says. Tensors of a step are freed by their counts alone: what a pass frees is small.

Source: MegaScale (NSDI '24), 6.3, on garbage collection as a cause of falling throughput.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_at_steps() -> Iterator[None]:
    """No pass of the collector meanwhile but those of `collect`."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_due(step: int, interval_steps: int) -> bool:
    """Whether to collect after this step; the same on every rank, and after every restart."""
    return step % interval_steps == 0


def collect() -> None:
    """One whole pass, of all generations."""
    gc.collect()
