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
with m >= 2 p: until its first micro-batch comes, and after its last one has left. In the paper
ranks begin their next step as soon as they are done, and it idles nothing; here a step begins on
all ranks once all know that gradients are finite, as with any other schedule.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainer.core.schedule.actions import ActionKind
from trainer.core.schedule.builders import zero_bubble_v
from trainer.core.schedule.proof import check
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

    `costs` are of one chunk. With fewer micro-batches than fill it, the schedule is run on paper.
    """
    forward, inputs, weights = _split_costs(costs)
    if num_micro_batches < 2 * num_stages:
        return check(zero_bubble_v(num_stages, num_micro_batches), costs).bubble
    idle = (num_stages - 1) * max(inputs, 2 * (inputs - weights))
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
