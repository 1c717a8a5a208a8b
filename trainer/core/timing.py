"""What a pipeline schedule costs in theory: its bubble and the micro-batches in flight.

Sources: Narayanan et al. (arXiv 2104.04473), 2.2. `trainer.core.schedule.check`
measures the same of a schedule that was built; a test holds them together.
"""

from __future__ import annotations

from trainer.core.schedule import bubble_share
from trainer.core.sizes import PlanInput


def bubble(facts: PlanInput) -> float:
    """Share of a step that a rank waits."""
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
        case _:
            further = facts.extra_warmup if stage < stages - 1 else 0
            return min(whole, stages - stage + further)
