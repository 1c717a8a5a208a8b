"""What a pipeline must lose to its bubble, by formula.

p stages, m micro-batches, v chunks per stage; every chunk takes equally long
and messages take no time. With m >= p a stage idles for p - 1 chunks of v m + p - 1
(Narayanan et al., arXiv 2104.04473, 2.2). With fewer micro-batches than stages a
chunk begins only when the one before it has been through the whole pipeline: a step
is as long as v p + m - 1 of them.

With split backwards, F, B and W are the times of a forward, of input gradients and of those of
weights. 1F1B idles (p - 1)(F + B + W), ZB-H1 fills W of that: (p - 1)(F + B - W) with m >= p
(Qi et al., arXiv 2401.10241, 2.3). Fewer micro-batches have fewer W's to fill it with. ZB-V,
with F, B and W those of one of its two chunks and W <= F <= B, idles (p - 1) max(B, 2 (B - W))
with m >= 2 p; with m <= p 2 (p - 1)(F + B) - 2 (m - 1) F, and in between 2 W less for each
micro-batch but the first one more. With F = W that is exact, and otherwise within a tenth of what
is idle. In the paper ranks begin their next step as soon as they are done, and it idles nothing;
here a step begins on all ranks once all know that gradients are finite, as with other schedules.
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
    forward, inputs, weights = _split_costs(costs)
    filled = min(num_stages, num_micro_batches) - 1
    idle = (num_stages - 1) * (forward + inputs) - filled * weights
    return idle / (num_micro_batches * (forward + inputs + weights) + idle)


def zero_bubble_v_share(
    num_stages: int,
    num_micro_batches: int,
    costs: Mapping[ActionKind, float] = DEFAULT_COSTS,
) -> float:
    """Idle time over all time of ZB-V, whose W takes no longer than its F, nor that than its B.

    `costs` are of one chunk.
    """
    forward, inputs, weights = _split_costs(costs)
    others, few = num_stages - 1, min(num_stages, num_micro_batches)
    more = max(0, num_micro_batches - num_stages - 1)
    filling = 2 * (others * (forward + inputs) - (few - 1) * forward - more * weights)
    idle = max(filling, others * max(inputs, 2 * (inputs - weights)))
    if num_micro_batches >= 2 * num_stages:
        idle = others * max(inputs, 2 * (inputs - weights))
    return idle / (2 * num_micro_batches * (forward + inputs + weights) + idle)


def _split_costs(costs: Mapping[ActionKind, float]) -> tuple[float, float, float]:
    """F, B and W."""
    return (
        costs[ActionKind.FORWARD],
        costs[ActionKind.BACKWARD_INPUT],
        costs[ActionKind.BACKWARD_WEIGHT],
    )


def _idle_chunks(num_stages: int, num_micro_batches: int, num_chunks: int) -> int:
    """How many uses of a chunk a stage could do in the time that it waits."""
    missing = max(0, num_stages - num_micro_batches)
    return num_chunks * missing + min(num_stages, num_micro_batches) - 1
