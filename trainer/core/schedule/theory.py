"""What a pipeline must lose to its bubble, by formula.

p stages, m micro-batches, v chunks per stage; every chunk takes equally long
and messages take no time. With m >= p a stage idles for p - 1 chunks of v m + p - 1
(Narayanan et al., arXiv 2104.04473, 2.2). With fewer micro-batches than stages a
chunk begins only when the one before it has been through the whole pipeline: a step
is as long as v p + m - 1 of them.

With split backwards, F, B and W are the times of a forward, of input gradients and of those of
weights. 1F1B idles (p - 1)(F + B + W), ZB-H1 fills W of that: (p - 1)(F + B - W) with m >= p
(Qi et al., arXiv 2401.10241, 2.3). Fewer micro-batches have fewer W's to fill it with.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.core.schedule.actions import ActionKind
from trainer.core.schedule.replay import DEFAULT_COSTS


def bubble_share(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """Idle time over all time, (p - 1) / (v m + p - 1) with m >= p."""
    idle = _idle_chunks(num_stages, num_micro_batches, num_chunks)
    return idle / (num_chunks * num_micro_batches + idle)


def bubble_over_work(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """Idle time over time at work, (p - 1) / (v m) with m >= p, as papers print it."""
    idle = _idle_chunks(num_stages, num_micro_batches, num_chunks)
    return idle / (num_chunks * num_micro_batches)


def zero_bubble_share(
    num_stages: int,
    num_micro_batches: int,
    costs: Mapping[ActionKind, float] = DEFAULT_COSTS,
) -> float:
    """Idle time over all time of ZB-H1, whose W takes no longer than its F, nor than its B."""
    forward, inputs, weights = (
        costs[kind]
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
    )
    filled = min(num_stages, num_micro_batches) - 1
    idle = (num_stages - 1) * (forward + inputs) - filled * weights
    return idle / (num_micro_batches * (forward + inputs + weights) + idle)


def _idle_chunks(num_stages: int, num_micro_batches: int, num_chunks: int) -> int:
    """How many uses of a chunk a stage could do in the time that it waits."""
    missing = max(0, num_stages - num_micro_batches)
    return num_chunks * missing + min(num_stages, num_micro_batches) - 1
