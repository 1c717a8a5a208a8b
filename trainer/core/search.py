"""The layouts of a job that are fastest by the projection, of those that fit the device.

The search is exact for the projection: a candidate is left out without being projected
only where it cannot matter, because its state alone does not fit, or because even its
products and its bubble, without any message, take longer than the best one found.

Which candidates there are is the caller's: `trainer.layouts` makes those of a job spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outlast.sizing.parameters import PlanInput, alike_stages
from trainer.core.memory import rank_memory, state_bytes
from trainer.core.projection import Machine, Projection, least_step_s, project

# Steps that differ by less are equally long, and the simpler layout is taken: a projection is
# never that exact.
_EQUAL = 0.01
_NEVER = math.inf
RECOMPUTES = ("none", "selective", "full")

Key: TypeAlias = Callable[[PlanInput], Hashable]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best candidate of a group."""

    index: int
    """Among the candidates."""
    facts: PlanInput
    step: Projection
    device_bytes: int
    """Of the rank that needs most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What a search found, and how much of it was looked at."""

    found: tuple[Found, ...]
    """The best of each group, fastest first."""
    num_candidates: int
    num_projected: int
    least_device_bytes: int
    """Of all candidates that were looked at; where none fits, of all."""


def mesh(facts: PlanInput) -> Hashable:
    """Candidates of one mesh differ in how it is used."""
    return facts.layout


def search(
    candidates: Sequence[PlanInput],
    machine: Machine,
    memory_bytes: float,
    *,
    group: Key = mesh,
) -> Searched:
    """The fastest candidate of each group that fits into `memory_bytes`, fastest group first."""
    groups: dict[Hashable, list[tuple[float, int]]] = {}
    for index, facts in enumerate(candidates):
        bound = least_step_s(facts, machine)
        groups.setdefault(group(facts), []).append((bound, index))
    best: list[Found] = []
    num_projected, least = 0, _NEVER
    for bounds in groups.values():
        found, projected, needed = _best(candidates, sorted(bounds), machine, memory_bytes)
        num_projected += projected
        least = min(least, needed)
        if found is not None:
            best.append(found)
    if not best:
        least = min((device_bytes(facts) for facts in _frugal(candidates)), default=0)
    return Searched(
        found=tuple(sorted(best, key=lambda one: _order(one.step.step_s, one.facts))),
        num_candidates=len(candidates),
        num_projected=num_projected,
        least_device_bytes=int(least),
    )


def device_bytes(facts: PlanInput) -> int:
    """What the rank that needs most needs."""
    # Later stages have fewer micro-batches in hand, unless gradients of weights are put off.
    stages = range(facts.layout.pp) if facts.splits_backward else alike_stages(facts)
    return max(rank_memory(facts, stage).device_bytes for stage in stages)


def _best(
    candidates: Sequence[PlanInput],
    bounds: Iterable[tuple[float, int]],
    machine: Machine,
    memory_bytes: float,
) -> tuple[Found | None, int, float]:
    """Of one group; with how many were projected, and the least memory that was asked for."""
    best: Found | None = None
    num_projected, least = 0, _NEVER
    for bound, index in bounds:
        if best is not None and _length(bound) > _length(best.step.step_s):
            break
        facts = candidates[index]
        if state_bytes(facts, 0) > memory_bytes:
            continue
        step = project(facts, machine)
        num_projected += 1
        if best is not None and _order(step.step_s, facts) >= _order(best.step.step_s, best.facts):
            continue
        needed = device_bytes(facts)
        least = min(least, needed)
        if needed <= memory_bytes:
            best = Found(index=index, facts=facts, step=step, device_bytes=needed)
    return best, num_projected, least


def _length(step_s: float) -> int:
    """Equal for steps that are about equally long."""
    return math.floor(math.log(step_s) / math.log1p(_EQUAL))


def _order(step_s: float, facts: PlanInput) -> tuple[float, ...]:
    """Shortest step first, then the simplest layout; larger micro-batches are fewer kernels."""
    layout = facts.layout
    return (
        _length(step_s),
        RECOMPUTES.index(facts.recompute[0]),
        facts.zero.level,
        layout.cp,
        layout.tp * layout.pp,
        layout.tp,
        facts.virtual_stages,
        facts.splits_backward,
        -facts.micro_batch,
        step_s,
    )


def _frugal(candidates: Sequence[PlanInput]) -> list[PlanInput]:
    """Those that can need least: with the most recompute, and the smallest micro-batch."""
    most = max((RECOMPUTES.index(facts.recompute[0]) for facts in candidates), default=0)
    small = min((facts.micro_batch for facts in candidates), default=0)
    return [
        facts
        for facts in candidates
        if facts.micro_batch == small and RECOMPUTES.index(facts.recompute[0]) == most
    ]
