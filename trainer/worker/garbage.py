"""Passes of Python's garbage collector at the same steps on all ranks.

Left to itself, each rank's collector runs when that rank has made enough objects, so in a large
job some rank pauses in almost every step and the others wait for it. Here it is off while steps
run, and every rank collects after the same ones.

Source: MegaScale (NSDI '24), 6.3, on garbage collection as a cause of falling throughput.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

# As torchtitan has it: seldom enough that a pass of some milliseconds does not count, and often
# enough that what it frees stays small. Tensors of a step are freed by their counts alone.
INTERVAL_STEPS: Final = 50


@contextmanager
def collected_at_steps() -> Iterator[None]:
    """No pass of the collector meanwhile but those of `collect_after`."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def collect_after(step: int) -> None:
    """Collect if it is time; the same on every rank, and after every restart."""
    if step % INTERVAL_STEPS == 0:
        gc.collect()
