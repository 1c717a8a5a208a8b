"""Why one layout is faster than another, and whether that is what a paper advises.

A step is a sum of a few terms; where two layouts differ is which terms do. The advice is
that of Narayanan et al. (arXiv 2104.04473), section 3, whose three takeaways the fastest
layout either follows, or there is one that follows them and takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainer.core.projection import Projection
from trainer.core.search import Found


class Takeaway(StrEnum):
    """What the paper advises."""

    TENSOR_IN_NODES = "tensor_in_nodes"
    """Tensor parallelism as wide as a node before pipeline parallelism across nodes."""
    LEAST_MODEL_PARALLEL = "least_model_parallel"
    """The smallest tp x pp that fits, and replicas for the rest."""
    MICRO_BATCH = "micro_batch"
    """The best micro-batch depends on all the rest: try each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One takeaway beside what the search found."""

    takeaway: Takeaway
    follows: bool
    other: Found | None
    """Where it does not follow, the fastest layout that does; of micro-batches the next one."""


def terms(step: Projection) -> dict[str, float]:
    """What a step consists of, in seconds; together they are `step_s`."""
    return {
        "products": step.compute_s - step.recompute_s,
        "recompute": step.recompute_s,
        "bubble": step.bubble_s,
        "tp": step.tp_exposed_s,
        "pp": step.pp_exposed_s,
        "dp": step.dp_exposed_s,
    }


def differences(best: Projection, other: Projection) -> list[tuple[str, float]]:
    """Seconds that each term of `other` is longer, those that differ most first."""
    mine, theirs = terms(best), terms(other)
    found = [(name, theirs[name] - mine[name]) for name in mine]
    return sorted(found, key=lambda each: -abs(each[1]))


def advice(
    found: Sequence[Found], by_micro_batch: Sequence[Found], ranks_per_node: int
) -> tuple[Advice, ...]:
    """The takeaways beside `found`, the fastest of each mesh, fastest first, and at least one."""
    best = found[0].facts.layout
    inside = [one for one in found if one.facts.layout.tp <= ranks_per_node]
    widest = max((one.facts.layout.tp for one in inside), default=best.tp)
    wide = next((one for one in inside if one.facts.layout.tp == widest), None)
    least = min(one.facts.layout.tp * one.facts.layout.pp for one in found)
    small = next(one for one in found if one.facts.layout.tp * one.facts.layout.pp == least)
    in_nodes = best.tp <= ranks_per_node and (best.pp == 1 or best.tp == widest)
    return (
        Advice(
            takeaway=Takeaway.TENSOR_IN_NODES, follows=in_nodes, other=None if in_nodes else wide
        ),
        Advice(
            takeaway=Takeaway.LEAST_MODEL_PARALLEL,
            follows=best.tp * best.pp == least,
            other=None if best.tp * best.pp == least else small,
        ),
        Advice(
            takeaway=Takeaway.MICRO_BATCH,
            follows=True,
            other=by_micro_batch[1] if len(by_micro_batch) > 1 else None,
        ),
    )
