"""What a job will need, before anything runs: parameters, FLOPs, memory, communication.

Plain arithmetic, used by `outlast plan`, and by a worker to say what it expected
beside what it measures. Each figure has its own module beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.flops import Convention, flops_per_token, recomputed_flops_per_token
from outlast.sizing.parameters import PlanInput, total_parameters
from trainer.core.memory import RankMemory, rank_memory
from trainer.core.timing import bubble, peak_in_flight
from trainer.core.traffic import Communication, communication


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a job will need."""

    world_size: int
    parameters: int
    flops_per_token: float
    """Model FLOPs, of attention what masks and windows let through."""
    full_flops_per_token: float
    """The same with every token attending to the whole sequence."""
    recomputed_flops_per_token: float
    tokens_per_step: int
    num_micro_batches: int
    chunk_layers: tuple[int, ...]
    """Transformer blocks of every chunk, in model order."""
    ranks: tuple[RankMemory, ...]
    """One entry a stage: all ranks of a stage need the same."""
    bubble: float
    peak_in_flight: tuple[int, ...]
    communication: Communication


def plan(facts: PlanInput) -> Plan:
    """The cost of the job that `facts` describe."""
    shape, stages = facts.model.shape, range(facts.layout.pp)
    ranks = tuple(rank_memory(facts, stage) for stage in stages)
    parts = [facts.parts(stage) for stage in stages]
    windowed = Convention.WINDOWED
    return Plan(
        world_size=facts.layout.world_size,
        parameters=total_parameters(facts),
        flops_per_token=flops_per_token(shape, windowed),
        full_flops_per_token=flops_per_token(shape, Convention.FULL),
        recomputed_flops_per_token=recomputed_flops_per_token(shape, facts.recompute, windowed),
        tokens_per_step=facts.global_batch * shape.seq_len,
        num_micro_batches=facts.num_micro_batches,
        chunk_layers=tuple(
            len(part.layers)
            for part in sorted(
                (part for held in parts for part in held), key=lambda part: part.layers.start
            )
        ),
        ranks=ranks,
        bubble=bubble(facts),
        peak_in_flight=tuple(peak_in_flight(facts, stage) for stage in stages),
        communication=communication(facts),
    )
