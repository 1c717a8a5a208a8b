"""What a pipeline must lose to its bubble, by formula.

p stages, m micro-batches, v chunks per stage; every chunk takes equally long
and messages take no time (Narayanan et al., arXiv 2104.04473, 2.2).
"""

from __future__ import annotations


def bubble_share(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """Idle time over all time, (p - 1) / (v m + p - 1)."""
    idle = num_stages - 1
    return idle / (num_chunks * num_micro_batches + idle)


def bubble_over_work(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """Idle time over time at work, (p - 1) / (v m), as papers print it."""
    return (num_stages - 1) / (num_chunks * num_micro_batches)
