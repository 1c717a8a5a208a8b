"""Whether a job fits the connected nodes, before anything is started.

Only what no connected node has is a problem of the spec: too few nodes may become more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from controller.access.roles import Caller, Role
from controller.core.capacity import capacities_in_words, lacking, need_in_words
from controller.core.records import JobPlan, NodeRecord
from outlast.problems import FieldProblem, shown
from outlast.sizing.describe import told_apart
from outlast.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a job fits the nodes that are connected."""

    connected: int
    fitting: int
    needed: int
    # What each node of the job must have, and what the connected ones have.
    need: str
    nodes: str
    # What no connected node has, by the field that asks for it.
    problems: tuple[FieldProblem, ...]
    # That it takes more nodes than its owner may have, which no node changes.
    beyond_quota: tuple[FieldProblem, ...] = ()

    def problems_where(self, *, nodes_come: bool) -> tuple[FieldProblem, ...]:
        """What is wrong with the spec; what present nodes lack is not, where others come."""
        return self.beyond_quota if nodes_come else (*self.problems, *self.beyond_quota)


def fit_of(
    spec: JobSpec, plan: JobPlan, nodes: Sequence[NodeRecord], owner: str, quota: int | None
) -> Fit:
    """How a job of an owner, who may have `quota` nodes, fits these nodes, which are connected."""
    fitting = sum(
        node.workers >= plan.workers_per_node and not lacking(plan.need, node.capacity)
        for node in nodes
    )
    return Fit(
        connected=len(nodes),
        fitting=fitting,
        needed=min((size.nodes for size in plan.sizes), default=plan.nodes),
        need=need_in_words(plan.workers_per_node, plan.need),
        nodes=capacities_in_words((node.workers, node.capacity) for node in nodes),
        problems=tuple(_problems(spec, plan, nodes)) if nodes and not fitting else (),
        beyond_quota=tuple(_beyond(plan, owner, quota)),
    )


def beyond_priority(priority: int, caller: Caller, most: int) -> tuple[FieldProblem, ...]:
    """That a caller gives a job a higher priority than he may."""
    if priority <= most or caller.role is None or caller.role >= Role.OPERATOR:
        return ()
    message = (
        f"is {priority}; {caller.name} is {caller.role.word} and may give up to {most} "
        "(queue.most_priority of the controller's configuration)"
    )
    return (FieldProblem(field="queue.priority", message=message),)


def _beyond(plan: JobPlan, owner: str, quota: int | None) -> Iterator[FieldProblem]:
    if quota is not None and plan.nodes > quota:
        yield FieldProblem(
            field="parallel",
            message=f"takes {plan.nodes} node(s) of {plan.workers_per_node} worker place(s), and "
            f"{owner} may have {quota} at a time (queue.owners, queue.nodes_per_owner of the "
            "controller's configuration)",
        )


def _problems(spec: JobSpec, plan: JobPlan, nodes: Sequence[NodeRecord]) -> list[FieldProblem]:
    known = [node.capacity for node in nodes if node.capacity is not None]
    problems = []
    places = max(node.workers for node in nodes)
    if places < plan.workers_per_node:
        given = "is" if spec.resources.workers_per_node is not None else "is by default"
        problems.append(
            FieldProblem(
                field="resources.workers_per_node",
                message=f"{given} {plan.workers_per_node}; the largest of {len(nodes)} connected "
                f"node(s) has {places} worker places (`--workers-per-node` of `outlast up`, "
                f"`--workers` of `outlast agent`); allowed: up to {places}",
            )
        )
    if spec.workload.image is not None and not any(
        node.image == spec.workload.image for node in nodes
    ):
        problems.append(
            FieldProblem(
                field="workload.image",
                message=f"is {shown(spec.workload.image)}, which none of {len(nodes)} connected "
                "node(s) runs in; a controller on Kubernetes starts nodes with the images of jobs: "
                "elsewhere leave it out, and name an interpreter of the nodes with workload.python",
            )
        )
    gpus = max((each.gpus for each in known), default=plan.need.gpus)
    if len(known) == len(nodes) and gpus < plan.need.gpus:
        has = "none has a GPU" if not gpus else f"the largest has {gpus}"
        fewer = f", or up to {gpus} for resources.workers_per_node" if gpus else ""
        problems.append(
            FieldProblem(
                field="resources.device",
                message=f"is 'cuda', which takes a GPU for each of {plan.need.gpus} ranks on a "
                f"node; of {len(nodes)} connected node(s) {has}; allowed: cpu, auto{fewer}",
            )
        )
    needed = plan.need.host_memory_bytes
    most = max((each.host_memory_bytes or needed for each in known), default=needed)
    if len(known) == len(nodes) and most < needed:
        needs, holds = told_apart(needed, most)
        problems.append(
            FieldProblem(
                field="model",
                message=f"checkpoints in host memory take {needs} of each node; "
                f"the largest of {len(nodes)} connected node(s) holds {holds}; split the "
                "model over more nodes (parallel.tp, parallel.pp, parallel.zero.level), or take a "
                "smaller one",
            )
        )
    return problems
