"""What a pipeline schedule costs in theory: its bubble and the micro-batches in flight.

Sources: Narayanan et al. (arXiv 2104.04473), 2.2; Qi et al. (2401.10241), 2.3 and 6.
`trainer.core.schedule.check` measures the same of a schedule that was built; a test holds them
together.
"""

from __future__ import annotations

from functools import lru_cache

from outlast.sizing.parameters import PlanInput
from trainer.core.schedule import (
    ActionKind,
    Schedule,
    bubble_share,
    build,
    zero_bubble_share,
    zero_bubble_v_share,
)
from trainer.core.schedule.replay import DEFAULT_COSTS

STEADY_ROUNDS = 8


def bubble(facts: PlanInput) -> float:
    """Share of a step that a rank waits."""
    if facts.splits_backward:
        # What is computed again comes before the gradients of inputs.
        again = facts.recompute.count("full") / len(facts.recompute)
        inputs = (
            DEFAULT_COSTS[ActionKind.BACKWARD_INPUT] + again * DEFAULT_COSTS[ActionKind.FORWARD]
        )
        costs = {**DEFAULT_COSTS, ActionKind.BACKWARD_INPUT: inputs}
        share = zero_bubble_v_share if facts.folds else zero_bubble_share
        return share(facts.layout.pp, facts.num_micro_batches, costs)
    return bubble_share(facts.layout.pp, facts.num_micro_batches, facts.virtual_stages)


def peak_in_flight(facts: PlanInput, stage: int) -> int:
    """The most micro-batches of chunks whose activations `stage` holds at once."""
    stages, chunks = facts.layout.pp, facts.virtual_stages
    whole = facts.num_micro_batches * chunks
    match facts.schedule:
        case "gpipe":
            return whole
        case "interleaved":
            # As long as the pipeline where that divides the micro-batches, else a little longer.
            num_rounds = max(1, facts.num_micro_batches // stages)
            longest_round = -(-facts.num_micro_batches // num_rounds)
            return min(whole, 2 * (stages - stage - 1) + (chunks - 1) * longest_round + 1)
        case "zb-h1":
            return min(whole, stages)
        case "zb-v":
            return min(whole, 2 * stages, facts.num_micro_batches + 1 + stage)
        case _:
            further = facts.extra_warmup if stage < stages - 1 else 0
            return min(whole, stages - stage + further)


def steady_micro_batches(num_stages: int, num_micro_batches: int) -> int:
    """Fewer micro-batches of which a stage holds as many at once as of `num_micro_batches`.

    Warm-ups are shorter than two rounds of the pipeline; rounds are as long, or longer by one.
    """
    rounds, rest = divmod(num_micro_batches, num_stages)
    if rounds <= max(STEADY_ROUNDS, rest):
        return num_micro_batches
    return STEADY_ROUNDS * num_stages + (1 if rest else 0)


def training_schedule(facts: PlanInput) -> Schedule:
    """The schedule that the trainer will run, up to when it repeats itself."""
    return _built(
        facts.schedule,
        facts.layout.pp,
        steady_micro_batches(facts.layout.pp, facts.num_micro_batches),
        facts.virtual_stages,
        facts.extra_warmup,
    )


# One plan asks for every stage, and a search for one schedule with several models.
@lru_cache(maxsize=64)
def _built(name: str, stages: int, micro_batches: int, chunks: int, extra_warmup: int) -> Schedule:
    return build(name, stages, micro_batches, num_chunks=chunks, extra_warmup=extra_warmup)
