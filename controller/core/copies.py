"""Which nodes keep the copies of a job's host memory, where it is known how nodes stand.

All ranks of a node have their copies on the node some places behind it. Which shift leads out of
most groups of ranks is in the plan; the one of an attempt leads out of racks first.

What does not belong here: how a shift is chosen (`outlast.replica_shift`).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq

from controller.core.attempt_record import AttemptRecord
from controller.core.frozen import replace
from controller.core.records import JobPlan, JobRecord, NodeRecord
from outlast.ids import NodeId
from outlast.layout import Layout
from outlast.replica_shift import choose_shift

# Of an attempt: what its nodes keep for each other is there by then.
_STEPS_UNTIL_COPIED = 3


def replica_shift(job: JobRecord, nodes: Sequence[NodeRecord], before: AttemptRecord | None) -> int:
    """By how many places copies are away from these nodes, in the order of their ranks; 0: by as
    many as the plan has it.

    `before` is the job's attempt until now. As long as a node of it is in its place, another one
    may need what it keeps, so copies stay where they are.
    """
    plan, names = job.plan, tuple(node.node for node in nodes)
    if before is not None and len(before.nodes) == len(names) and any(map(eq, before.nodes, names)):
        kept = before.replica_shift
        # A node that was not there before may have too little: then some ranks go to storage.
        return kept if not kept or _has_room(plan, nodes) else 0
    domains = [node.path for node in nodes]
    if not plan.replica_shift or not any(domains) or not _has_room(plan, nodes):
        return 0
    layout = Layout(tp=plan.tp, pp=plan.pp, dp=plan.world_size // (plan.tp * plan.pp))
    places = [rank // plan.workers_per_node for rank in range(plan.world_size)]
    return choose_shift(layout, places, plan.nodes, range(plan.world_size), domains)


def partner_indexes(plan: JobPlan, shift: int, index: int) -> tuple[int, ...]:
    """Those of the nodes that have the state of this one's ranks, too; `shift` is the attempt's."""
    if not plan.replica_node_indexes:
        return ()
    planned = plan.replica_node_indexes[index]
    if not shift:
        return planned
    # Beside the layout's, which may have a twin of one of the ranks as well.
    holder = (index + shift) % plan.nodes
    return tuple(dict.fromkeys((*planned, holder)))


def unfilled(job: JobRecord, attempt: AttemptRecord | None, step: int) -> frozenset[NodeId]:
    """Nodes of an attempt that came to `step` which do not keep all yet that they are to keep for
    others."""
    if attempt is None:
        return frozenset()
    has_copied = job.resumed_step is not None and step >= job.resumed_step + _STEPS_UNTIL_COPIED
    if has_copied:
        return frozenset()
    return frozenset(attempt.nodes if attempt.all_new else attempt.new_nodes)


def with_new_nodes(
    attempt: AttemptRecord, job: JobRecord, before: AttemptRecord | None, step: int
) -> AttemptRecord:
    """An attempt with those of its nodes that begin without what they are to keep for others;
    `before` is the attempt until now, which came to `step`, `job` as it was in that."""
    names = attempt.nodes
    if before is None or len(before.nodes) != len(names):
        return replace(attempt, all_new=True)
    without = unfilled(job, before, step)
    is_elsewhere = before.replica_shift != attempt.replica_shift
    pairs = zip(before.nodes, names, strict=True)
    new = tuple(name for old, name in pairs if is_elsewhere or old != name or name in without)
    # Short, where it is all of thousands.
    return replace(attempt, all_new=True) if new == names else replace(attempt, new_nodes=new)


def _has_room(plan: JobPlan, nodes: Sequence[NodeRecord]) -> bool:
    """Whether each of the nodes can keep the copies of any other one; unknown counts as room."""
    known = (node.capacity.host_memory_bytes for node in nodes if node.capacity is not None)
    return all(most >= plan.any_shift_bytes for most in known if most)
