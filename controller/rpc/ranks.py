"""The Ranks service: what each rank of a job was last heard to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

import grpc
from google.protobuf.message import DecodeError

from controller.core.edge.edge import Edge
from controller.core.incident_record import Evidence, IncidentRecord
from controller.core.records import JobRecord
from controller.grpc_errors import Context, abort, bad_field, not_found
from controller.rpc.views import incidents_of
from controller.service import Service
from controller.sessions.logs import LogQueries, SlowReaderError, TooManyQueriesError
from outlast.blackbox import NUM_STEP_RECORDS
from outlast.ids import JobId
from outlast.layout import Layout
from outlast.trace.heat import Measure, node_stride
from outlast.v1 import agents_pb2, jobs_pb2, ranks_pb2
from outlast.v1.ranks_pb2_grpc import RanksServicer

# In one answer, some 1 MB; and in one turn of the loop, some 5 ms of work.
MOST, AT_ONCE = 4_096, 256
# Of any job.
MOST_RANKS = 1 << 17
# Of what is said of a fault: an answer has thousands of ranks.
MOST_LETTERS = 400
# Of a profile, so that it fits into one message.
MOST_SECONDS, MOST_SAMPLES = 60, 250


class RanksService(RanksServicer):
    """Lists ranks."""

    def __init__(self, service: Service, edge: Edge, logs: LogQueries) -> None:
        self._service = service
        self._edge = edge
        self._logs = logs

    async def ListRanks(
        self, request: ranks_pb2.ListRanksRequest, context: Context
    ) -> ranks_pb2.ListRanksResponse:
        """Some ranks of the present attempt."""
        job = await self._known(request.job_id, context)
        num_ranks = job.plan.world_size
        if not 0 <= request.first < num_ranks:
            await bad_field(context, "first", f"is {request.first}; allowed: 0 to {num_ranks - 1}")
        if not 0 <= request.most <= MOST:
            await bad_field(context, "most", f"is {request.most}; allowed: 1 to {MOST}, or 0")
        last = min(num_ranks, request.first + (request.most or MOST))
        layout = _layout_of(job)
        faults = newest_faults(incidents_of(self._service.state, request.job_id))
        listed = []
        for first in range(request.first, last, AT_ONCE):
            ranks = range(first, min(last, first + AT_ONCE))
            heard = {each.rank: each for each in self._edge.some_summaries(job, ranks)}
            listed += [
                _rank_message(job, layout, rank, heard.get(rank), faults.get(rank))
                for rank in ranks
            ]
            # Heartbeats come before the rest of it.
            await asyncio.sleep(0)
        return ranks_pb2.ListRanksResponse(
            ranks=listed,
            num_ranks=num_ranks,
            attempt=job.attempt,
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            ep=layout.ep,
            cp=layout.cp,
            workers_per_node=job.plan.workers_per_node,
        )

    async def ReadTimes(
        self, request: ranks_pb2.ReadTimesRequest, context: Context
    ) -> AsyncIterator[ranks_pb2.ReadTimesResponse]:
        """What black boxes have of the last operations, steps and spans of a job's ranks."""
        job = await self._known(request.job_id, context)
        if not 0 <= request.attempt <= job.attempt:
            allowed = f"1 to {job.attempt}, or 0"
            await bad_field(context, "attempt", f"is {request.attempt}; allowed: {allowed}")
        # An earlier one may have had more.
        is_newest = request.attempt in (0, job.attempt)
        await _check_ranks(request, job.plan.world_size if is_newest else MOST_RANKS, context)
        if request.measure and request.measure not in [*Measure]:
            allowed = ", ".join(Measure)
            await bad_field(context, "measure", f"is {request.measure!r}; allowed: {allowed}")
        if not 0 <= request.most_steps <= NUM_STEP_RECORDS:
            allowed = f"1 to {NUM_STEP_RECORDS}, or 0"
            await bad_field(context, "most_steps", f"is {request.most_steps}; allowed: {allowed}")
        # Where an earlier attempt ran is not known before its nodes answer.
        most_ranks = 0 if request.attempt else request.most_ranks
        asked = jobs_pb2.LogsRequest(
            job_id=request.job_id,
            rank=request.rank if request.HasField("rank") else None,
            attempt=request.attempt,
        )
        kind = agents_pb2.LogQuery(
            times=True,
            measure=request.measure,
            most_steps=request.most_steps,
            first_step=request.first_step,
            last_step=request.last_step,
            num_ranks=request.num_ranks,
            since_s=request.since_s,
        )
        try:
            stride = node_stride(_layout_of(job), job.plan.workers_per_node, most_ranks)
            async for found in self._logs.read(asked, kind=kind, node_stride=stride):
                yield _times_message(found)
        except (SlowReaderError, TooManyQueriesError) as error:
            await abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{error}; ask for some ranks, or some steps",
                reason="TIMES_LIMIT",
            )

    async def ReadStacks(
        self, request: ranks_pb2.ReadStacksRequest, context: Context
    ) -> AsyncIterator[ranks_pb2.ReadStacksResponse]:
        """Where ranks that run stand now."""
        job = await self._known(request.job_id, context)
        await _check_ranks(request, job.plan.world_size, context)
        rank = request.rank if request.HasField("rank") else None
        asked = jobs_pb2.LogsRequest(job_id=request.job_id, rank=rank)
        kind = agents_pb2.LogQuery(stacks=True, native=request.native)
        try:
            async for found in self._logs.read(asked, kind=kind):
                yield _stacks_message(found)
        except (SlowReaderError, TooManyQueriesError) as error:
            await abort(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), reason="STACKS_LIMIT"
            )

    async def RecordProfile(
        self, request: ranks_pb2.RecordProfileRequest, context: Context
    ) -> ranks_pb2.RecordProfileResponse:
        """Where a rank that runs is, for some seconds from now."""
        job = await self._known(request.job_id, context)
        last = job.plan.world_size - 1
        if not 0 <= request.rank <= last:
            await bad_field(context, "rank", f"is {request.rank}; allowed: 0 to {last}")
        if not 1 <= request.seconds <= MOST_SECONDS:
            what = f"is {request.seconds}; allowed: 1 to {MOST_SECONDS}"
            await bad_field(context, "seconds", what)
        if not 1 <= request.rate <= MOST_SAMPLES:
            await bad_field(context, "rate", f"is {request.rate}; allowed: 1 to {MOST_SAMPLES}")
        asked = jobs_pb2.LogsRequest(job_id=request.job_id, rank=request.rank)
        recording = agents_pb2.Recording(seconds=request.seconds, rate=request.rate)
        kind = agents_pb2.LogQuery(recording=recording, native=request.native)
        message, why = ranks_pb2.RecordProfileResponse(), "it does not run now"
        try:
            async with aclosing(self._logs.read(asked, kind=kind)) as answers:
                async for found in answers:
                    message, why = _profile_message(found)
                    if not why:
                        break
        except (SlowReaderError, TooManyQueriesError) as error:
            await abort(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), reason="PROFILE_LIMIT"
            )
        if why:
            why = f"rank {request.rank} of {request.job_id} has no profile: {why}"
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, why, reason="NO_PROFILE")
        return message

    async def _known(self, name: str, context: Context) -> JobRecord:
        job = self._service.state.jobs.get(JobId(name))
        if job is None:
            await not_found(context, "job", name, "`outlast jobs` lists them")
        return job


async def _check_ranks(
    request: ranks_pb2.ReadTimesRequest | ranks_pb2.ReadStacksRequest,
    most: int,
    context: Context,
) -> None:
    if request.HasField("rank") and not 0 <= request.rank < most:
        await bad_field(context, "rank", f"is {request.rank}; allowed: 0 to {most - 1}")
    if isinstance(request, ranks_pb2.ReadTimesRequest):
        if not 0 <= request.num_ranks <= most:
            await bad_field(context, "num_ranks", f"is {request.num_ranks}; allowed: 0 to {most}")
        if request.most_ranks < 0:
            await bad_field(context, "most_ranks", f"is {request.most_ranks}; allowed: 0 or more")


def _stacks_message(found: jobs_pb2.LogsResponse) -> ranks_pb2.ReadStacksResponse:
    message = ranks_pb2.ReadStacksResponse(node=found.node, rank=found.rank, attempt=found.attempt)
    if found.HasField("missing"):
        message.missing.CopyFrom(found.missing)
        return message
    try:
        stacks = agents_pb2.RankStacks.FromString(found.data)
    except DecodeError:
        # Of an agent that knows of logs only, this is one.
        message.missing.reason = "its agent is of a version that does not send stacks"
        message.missing.first_rank, message.missing.num_ranks = found.rank, 1
        return message
    message.location, message.text = stacks.location, stacks.text
    return message


def _profile_message(found: jobs_pb2.LogsResponse) -> tuple[ranks_pb2.RecordProfileResponse, str]:
    """An answer, or why it has no profile."""
    message = ranks_pb2.RecordProfileResponse(node=found.node, attempt=found.attempt)
    if found.HasField("missing"):
        reason = found.missing.reason
        return message, f"{found.node}: {reason}" if found.node else reason
    try:
        profile = agents_pb2.RankProfile.FromString(found.data)
    except DecodeError:
        # Of an agent that knows of logs only, this is one.
        return message, "its agent is of a version that does not record profiles"
    message.speedscope = profile.speedscope
    return message, profile.problem or ("" if profile.speedscope else "its agent sent none")


def _times_message(found: jobs_pb2.LogsResponse) -> ranks_pb2.ReadTimesResponse:
    message = ranks_pb2.ReadTimesResponse(node=found.node, rank=found.rank, attempt=found.attempt)
    if found.HasField("missing"):
        message.missing.CopyFrom(found.missing)
        return message
    try:
        message.times.ParseFromString(found.data)
    except DecodeError:
        # Of an agent that knows of logs only, this is one.
        message.missing.reason = "its agent is of a version that does not tell times"
        message.missing.first_rank, message.missing.num_ranks = found.rank, 1
    return message


def newest_faults(
    incidents: Iterable[IncidentRecord],
) -> dict[int, tuple[IncidentRecord, Evidence]]:
    """Of each rank that incidents have evidence of, the newest; `incidents` come oldest first."""
    found: dict[int, tuple[IncidentRecord, Evidence]] = {}
    for incident in incidents:
        for evidence in incident.evidence:
            if evidence.rank is None:
                continue
            known = found.get(evidence.rank)
            if known is None or known[1].at_s <= evidence.at_s:
                found[evidence.rank] = (incident, evidence)
    return found


def _layout_of(job: JobRecord) -> Layout:
    plan = job.plan
    # The ranks of a script are replicas, as far as anybody knows.
    dp = plan.world_size // (plan.tp * plan.pp)
    return Layout(tp=plan.tp, pp=plan.pp, dp=dp, ep=plan.ep, cp=plan.cp)


def _rank_message(
    job: JobRecord,
    layout: Layout,
    rank: int,
    heard: agents_pb2.RankSummary | None,
    fault: tuple[IncidentRecord, Evidence] | None,
) -> ranks_pb2.Rank:
    at = layout.coordinate(rank)
    place = rank // job.plan.workers_per_node
    node = job.nodes[place] if place < len(job.nodes) else None
    message = ranks_pb2.Rank(
        rank=rank, node=node or "", tp=at.tp, pp=at.pp, dp=at.dp, completed_step=-1
    )
    if fault is not None:
        message.last_fault.CopyFrom(_fault_message(*fault))
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
                peer=_peer_rank(rank, last, layout),
                age_s=heard.last_op_age_s,
            )
        )
    if heard.HasField("use"):
        message.split.CopyFrom(heard.use.split)
        message.peak_memory_bytes = heard.use.peak_memory_bytes
    return message


def _fault_message(incident: IncidentRecord, evidence: Evidence) -> ranks_pb2.RankFault:
    return ranks_pb2.RankFault(
        incident_id=incident.incident,
        attempt=incident.attempt,
        incident_state=incident.state,
        kind=evidence.kind,
        detail=evidence.detail[:MOST_LETTERS],
        at_s=evidence.at_s,
    )


def _peer_rank(rank: int, last: agents_pb2.Operation, layout: Layout) -> int | None:
    """The other end of a send or receive; None where that is not known."""
    if not last.HasField("peer") or last.op not in ("send", "recv"):
        return None
    if last.group == "world":
        return last.peer if last.peer < layout.world_size else None
    try:
        group = layout.group_of(last.group, rank)
    except ValueError:
        return None
    return group[last.peer] if 0 <= last.peer < len(group) else None
