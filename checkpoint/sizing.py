"""How much host memory the checkpoints of a node's ranks need. Imports no torch.

A slot's size is computed in `outlast.sizing.slots`, how many there are follows from where
copies go (`checkpoint.replicas.placing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from checkpoint.core.placement import Placement
from checkpoint.core.slots import NUM_HELD_SLOTS, NUM_SLOTS
from checkpoint.replicas.placing import num_own_slots, placement_of, slots_by_stage
from outlast.sizing.of_spec import plan_input
from outlast.sizing.slots import host_slot_bytes
from outlast.spec import JobSpec


def host_memory_bytes(spec: JobSpec, ranks: Iterable[int], *, shift: int = 0) -> int:
    """Enough tmpfs for the host-memory checkpoints of these ranks, which share a node.

    Copies that the node keeps for another one are part of it; `shift` says which that is, as in
    `placement_of`.
    """
    placement = placement_of(spec, shift=shift)
    slots = dict.fromkeys(ranks, num_own_slots(placement))
    if placement is not None:
        for place in {rank // spec.workers_per_node for rank in slots}:
            slots |= dict.fromkeys(placement.held_on(str(place)), NUM_HELD_SLOTS)
    counts: Counter[int] = Counter()
    ranks_per_stage = spec.layout.tp * spec.layout.dp
    for rank, count in slots.items():
        counts[rank // ranks_per_stage] += count
    return _stages_bytes(spec, [counts.items()])[0]


def node_host_memory_bytes(spec: JobSpec) -> int:
    """Enough tmpfs for any node of the job, which holds consecutive ranks."""
    return placed_host_memory_bytes(spec, placement_of(spec))


def placed_host_memory_bytes(spec: JobSpec, placement: Placement | None) -> int:
    """The same where the job's placement is known, with nodes called by their place."""
    # Of many nodes few hold different numbers of slots of each stage.
    kinds = {frozenset(counts.items()) for counts in slots_by_stage(spec, placement)}
    return max(_stages_bytes(spec, kinds))


def any_shift_host_memory_bytes(spec: JobSpec, placement: Placement) -> int:
    """The same, whichever other node's copies each node keeps: those with the most there are."""
    kinds = {frozenset(counts.items()) for counts in slots_by_stage(spec, None)}
    slots = num_own_slots(placement) + NUM_HELD_SLOTS
    return max(_stages_bytes(spec, kinds)) // NUM_SLOTS * slots


def _stages_bytes(spec: JobSpec, nodes: Collection[Collection[tuple[int, int]]]) -> list[int]:
    """Bytes of so many slots of each stage, for each of some nodes."""
    facts = plan_input(spec)
    stages = {stage for counts in nodes for stage, _ in counts}
    each = {stage: host_slot_bytes(facts, stage) for stage in stages}
    return [sum(count * each[stage] for stage, count in counts) for counts in nodes]
