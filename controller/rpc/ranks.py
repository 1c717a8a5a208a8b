"""The Ranks service: what each rank of a job was last heard to do."""

from __future__ import annotations

from controller.core.edge.edge import Edge
from controller.core.records import JobRecord
from controller.grpc_errors import Context, bad_field, not_found
from controller.service import Service
from outlast.ids import JobId
from outlast.layout import Layout
from outlast.v1 import agents_pb2, ranks_pb2
from outlast.v1.ranks_pb2_grpc import RanksServicer

# In one answer, some 1 MB and 20 ms of work.
MOST = 4_096


class RanksService(RanksServicer):
    """Lists ranks."""

    def __init__(self, service: Service, edge: Edge) -> None:
        self._service = service
        self._edge = edge

    async def ListRanks(
        self, request: ranks_pb2.ListRanksRequest, context: Context
    ) -> ranks_pb2.ListRanksResponse:
        """Some ranks of the present attempt."""
        job = self._service.state.jobs.get(JobId(request.job_id))
        if job is None:
            await not_found(context, "job", request.job_id, "`outlast jobs` lists them")
        num_ranks = job.plan.world_size
        if not 0 <= request.first < num_ranks:
            await bad_field(context, "first", f"is {request.first}; allowed: 0 to {num_ranks - 1}")
        if not 0 <= request.most <= MOST:
            await bad_field(context, "most", f"is {request.most}; allowed: 1 to {MOST}, or 0")
        ranks = range(request.first, min(num_ranks, request.first + (request.most or MOST)))
        heard = {each.rank: each for each in self._edge.some_summaries(job, ranks)}
        layout = _layout_of(job)
        return ranks_pb2.ListRanksResponse(
            ranks=[_rank_message(job, layout, rank, heard.get(rank)) for rank in ranks],
            num_ranks=num_ranks,
            attempt=job.attempt,
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            ep=layout.ep,
        )


def _layout_of(job: JobRecord) -> Layout:
    plan = job.plan
    # The ranks of a script are replicas, as far as anybody knows.
    return Layout(tp=plan.tp, pp=plan.pp, dp=plan.world_size // (plan.tp * plan.pp), ep=plan.ep)


def _rank_message(
    job: JobRecord, layout: Layout, rank: int, heard: agents_pb2.RankSummary | None
) -> ranks_pb2.Rank:
    at = layout.coordinate(rank)
    place = rank // job.plan.workers_per_node
    node = job.nodes[place] if place < len(job.nodes) else None
    message = ranks_pb2.Rank(
        rank=rank, node=node or "", tp=at.tp, pp=at.pp, dp=at.dp, completed_step=-1
    )
    if heard is None:
        return message
    message.phase = heard.phase
    message.completed_step = heard.completed_step
    message.step_age_s = heard.step_age_s
    message.stalled_s = heard.stalled_s
    message.stall_limit_s = heard.stall_limit_s
    message.process_state = heard.process_state
    message.entered.update(heard.entered)
    if heard.HasField("last_operation"):
        last = heard.last_operation
        message.last_operation.CopyFrom(
            ranks_pb2.WaitingOperation(
                op=last.op,
                group=last.group,
                sequence=last.sequence,
                detail=last.detail,
                is_inside=last.is_inside,
                age_s=heard.last_op_age_s,
            )
        )
    if heard.HasField("use"):
        message.split.CopyFrom(heard.use.split)
        message.peak_memory_bytes = heard.use.peak_memory_bytes
    return message
