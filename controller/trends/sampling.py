"""What ranks were last heard to say of their steps, gathered in turns with heartbeats."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from controller.core.edge.edge import Edge
from controller.core.records import JobRecord
from controller.specs import settings_of
from diagnostics.core.launches import LaunchWindow, RankSteps
from outlast.ids import NodeId
from outlast.v1 import common_pb2

# Of the loop, some milliseconds.
_AT_ONCE = 512


@dataclass(slots=True)
class Window:
    """Samples of an attempt, on the nodes that it has."""

    attempt: int
    begun_s: float
    nodes: tuple[NodeId, ...]
    launches: LaunchWindow
    num_samples: int = 0
    # When a sample was taken last, and for how long samples were.
    last_s: float | None = None
    service_s: float = field(default=0.0)


def begin_window(job: JobRecord, now_s: float) -> Window:
    """An empty window of a job's present attempt."""
    layout = settings_of(job).layout
    nodes = {
        rank: node
        for rank in range(layout.world_size)
        if (node := job.nodes[rank // job.plan.workers_per_node]) is not None
    }
    stage = layout.tp * layout.dp
    equals = [range(first, first + stage) for first in range(0, layout.world_size, stage)]
    return Window(
        attempt=job.attempt,
        begun_s=now_s,
        nodes=tuple(dict.fromkeys(nodes.values())),
        launches=LaunchWindow(equals, layout.dp_groups(), nodes),
    )


def layout_of(job: JobRecord) -> str:
    """The layout in a word: hours of equal words can be compared."""
    layout = settings_of(job).layout
    context = f"-cp{layout.cp}" if layout.cp > 1 else ""
    return f"tp{layout.tp}-pp{layout.pp}-dp{layout.dp}-ep{layout.ep}{context}"


async def gather(job: JobRecord, edge: Edge) -> dict[int, RankSteps]:
    """What each rank of the present attempt said last of its steps."""
    found: dict[int, RankSteps] = {}
    for first in range(0, job.plan.world_size, _AT_ONCE):
        ranks = range(first, min(job.plan.world_size, first + _AT_ONCE))
        for summary in edge.some_summaries(job, ranks):
            if summary.HasField("use"):
                found[summary.rank] = rank_steps(summary.use.split)
        # Heartbeats come before the rest of it.
        await asyncio.sleep(0)
    return found


def rank_steps(split: common_pb2.StepSplit) -> RankSteps:
    """What a rank says of a step of its last ones."""
    work_s = split.forward_s + split.backward_s + split.optimizer_s
    waited_s = split.tp_exposed_s + split.pp_exposed_s + split.dp_exposed_s + split.other_exposed_s
    return RankSteps(
        work_s=work_s,
        waited_s=split.dp_exposed_s,
        step_s=work_s + waited_s + split.data_s + split.data_wait_s,
    )
