"""What a pipeline schedule costs in theory: its bubble and the micro-batches in flight.

Sources: Narayanan et al. (arXiv 2104.04473), 2.2. `trainer.core.schedule.check`
measures the same of a schedule that was built; a test holds them together.
"""

from __future__ import annotations

from trainer.core.sizes import PlanInput


def bubble(facts: PlanInput) -> float:
    """Share of a step that a rank waits: (p - 1) / (v m + p - 1)."""
    idle = facts.layout.pp - 1
    return idle / (facts.virtual_stages * facts.num_micro_batches + idle)


def peak_in_flight(facts: PlanInput, stage: int) -> int:
    """The most micro-batches of chunks whose activations `stage` holds at once."""
    stages, chunks = facts.layout.pp, facts.virtual_stages
    whole = facts.num_micro_batches * chunks
    match facts.schedule:
        case "gpipe":
            return whole
        case "interleaved":
            return min(whole, 2 * (stages - stage - 1) + (chunks - 1) * stages + 1)
        case _:
            return min(whole, stages - stage)
