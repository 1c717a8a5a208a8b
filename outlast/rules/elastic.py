"""The smaller sizes that a job with `recovery.elastic` may go on at.

Only the number of replicas changes: the global batch stays, and a sample's place follows from
the step alone, so the loss curve goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, closest, divisors
from outlast.recovery import ElasticSpec
from outlast.rules import layout

if TYPE_CHECKING:
    from outlast.spec import JobSpec


def check(spec: JobSpec) -> list[FieldProblem]:
    """There must be a size to go on at."""
    least = spec.recovery.elastic.min_dp
    if least is None or smaller_sizes(spec):
        return []
    allowed = [size.parallel.dp for size in _sizes_from(spec, 1)]
    if allowed:
        near = ", ".join(str(dp) for dp in closest(allowed, least))
        what = f"at most {allowed[0]} (sizes near it: {near})"
    else:
        what = "null, as no smaller number divides the batch and fills whole nodes"
    return [
        FieldProblem(
            field="recovery.elastic.min_dp",
            message=f"is {least}, and no number of replicas from there to below parallel.dp = "
            f"{spec.parallel.dp} works with data.global_batch = {spec.data.global_batch}, "
            f"parallel.micro_batch = {spec.parallel.micro_batch} and {spec.workers_per_node} "
            f"workers per node; allowed: {what}",
        )
    ]


def smaller_sizes(spec: JobSpec) -> list[JobSpec]:
    """The spec at each smaller number of replicas that it allows, largest first."""
    least = spec.recovery.elastic.min_dp
    return [] if least is None else _sizes_from(spec, least)


def _sizes_from(spec: JobSpec, least: int) -> list[JobSpec]:
    batches = spec.data.global_batch // spec.parallel.micro_batch
    numbers = [dp for dp in divisors(batches) if least <= dp < spec.parallel.dp]
    sizes = [_with_replicas(spec, dp) for dp in reversed(numbers)]
    return [size for size in sizes if not layout.check(size)]


def _with_replicas(spec: JobSpec, dp: int) -> JobSpec:
    """The spec as if it had been written for so many replicas on such nodes."""
    per_node = spec.workers_per_node
    parallel = spec.parallel
    num_nodes = dp * parallel.cp * parallel.tp * parallel.pp // per_node
    zero, checkpoint = parallel.zero, spec.checkpoint
    # What only means something between replicas, or between nodes, has nobody to do it with.
    if dp * parallel.cp == 1:
        zero = zero.model_copy(update={"communication": None})
    if num_nodes == 1:
        checkpoint = checkpoint.model_copy(update={"replicas": 0})
    nodes = None if spec.resources.nodes is None else num_nodes
    resources = {"workers_per_node": per_node, "nodes": nodes}
    return spec.model_copy(
        update={
            "parallel": spec.parallel.model_copy(update={"dp": dp, "zero": zero}),
            "checkpoint": checkpoint,
            "resources": spec.resources.model_copy(update=resources),
            # This size has none of its own.
            "recovery": spec.recovery.model_copy(update={"elastic": ElasticSpec()}),
        }
    )
