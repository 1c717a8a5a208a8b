"""A curve with fewer points that looks the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def kept_rows(losses: Sequence[float], always: Sequence[int], most: int) -> list[int]:
    """Indexes of the rows to show, ascending: all, if they are at most `most`.

    Else rows are divided into buckets of as many rows, and of each those with the lowest and the
    highest loss are kept, so that no spike is lost; besides them the first row, the last, and
    those of `always`.
    """
    num_rows = len(losses)
    if num_rows <= most:
        return list(range(num_rows))
    num_buckets = max(1, most // 2)
    kept = {0, num_rows - 1, *always}
    for bucket in range(num_buckets):
        rows = range(bucket * num_rows // num_buckets, (bucket + 1) * num_rows // num_buckets)
        finite = [row for row in rows if math.isfinite(losses[row])]
        if finite:
            kept.add(min(finite, key=losses.__getitem__))
            kept.add(max(finite, key=losses.__getitem__))
        elif rows:
            kept.add(rows[0])
    return sorted(kept)
