"""Long tables of numbers in few bytes, for the journal.

Which nodes keep copies is a table of one row per node, and nearly all of its rows say the same:
"the node so many further on". At 12,500 nodes the rows themselves take 100 kB in every
record of the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

Rows = tuple[tuple[int, ...], ...]


def pack_rows(rows: Rows) -> list[list[int]]:
    """Runs of rows that are alike: how many, and how far each number is from its row's index."""
    offsets = (tuple(number - index for number in row) for index, row in enumerate(rows))
    return [[len(list(run)), *alike] for alike, run in groupby(offsets)]


def unpack_rows(runs: Iterable[Iterable[int]]) -> Rows:
    """The rows that `pack_rows` took."""
    rows: list[tuple[int, ...]] = []
    for count, *offsets in runs:
        begun = len(rows)
        rows += (tuple(index + each for each in offsets) for index in range(begun, begun + count))
    return tuple(rows)
