"""Names in sentences: a fault may hit thousands of nodes, and its reason is read by people."""

from __future__ import annotations

from collections.abc import Sequence

# A reason with more names is journalled, sent and read by nobody to its end.
MOST_NAMES = 8


def names(ids: Sequence[str]) -> str:
    """The ids with commas between them; of many only the first, and how many more there are."""
    if len(ids) <= MOST_NAMES:
        return ", ".join(ids)
    return f"{', '.join(ids[:MOST_NAMES])} and {len(ids) - MOST_NAMES:,} more"
