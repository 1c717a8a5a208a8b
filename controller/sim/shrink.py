"""A failing run made small: which of its faults it takes. Pure."""

from __future__ import annotations

from collections.abc import Callable


def shrink(faults: tuple[int, ...], fails: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """A part of the faults that still fails, and of which no single one can be left out.

    Leaves out ever smaller pieces (delta debugging: Zeller, 1999). `fails` runs with some of
    the faults only; it is asked about `faults` itself never.
    """
    size = max(1, len(faults) // 2)
    while faults:
        pieces = [faults[i : i + size] for i in range(0, len(faults), size)]
        for piece in pieces:
            rest = tuple(fault for fault in faults if fault not in piece)
            if fails(rest):
                faults = rest
                break
        else:
            if size == 1:
                return faults
            size = max(1, size // 2)
        size = min(size, max(1, len(faults) // 2))
    return faults
