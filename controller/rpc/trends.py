"""The Trends service: what days and weeks of training show."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping

from controller.core.changes import State
from controller.core.records import JobRecord
from controller.diagnosis.runs import DiagnosticRuns
from controller.efficiency import peak_of
from controller.grpc_errors import Context, bad_field, not_found
from controller.service import Service
from controller.specs import spec_of
from controller.store.diagnoses import parse
from controller.store.trends import DAY_S, KEPT_S
from controller.trends.watch import NODE_DAYS, TrendWatch, known_periods
from diagnostics.core.finding import CheckVerdict
from diagnostics.core.history import History, Hour, describe, findings
from diagnostics.core.node_days import NodeDay
from diagnostics.core.periods import PeriodicStall
from diagnostics.core.trends import Trend
from outlast.flops import Convention, flops_per_token
from outlast.ids import JobId, NodeId
from outlast.v1 import diagnostics_pb2, trends_pb2
from outlast.v1.trends_pb2_grpc import TrendsServicer

MOST_DAYS = int(KEPT_S // DAY_S)
# Of a job, those that are often the slowest.
_MOST_NODES = 100


class TrendsService(TrendsServicer):
    """Shows trends of jobs, and statistics of nodes."""

    def __init__(
        self,
        service: Service,
        watch: TrendWatch,
        runs: DiagnosticRuns,
        matmul_flops: Mapping[NodeId, float],
    ) -> None:
        """`matmul_flops` is what a worker of each node reached in the matmul check, in FLOP/s."""
        self._service = service
        self._matmul_flops = matmul_flops
        self._watch = watch
        self._runs = runs

    async def GetJobTrends(
        self, request: trends_pb2.GetJobTrendsRequest, context: Context
    ) -> trends_pb2.JobTrends:
        """What a job's hours and its newest steps show."""
        job = self._service.state.jobs.get(JobId(request.job_id))
        if job is None:
            await not_found(context, "job", request.job_id, "`outlast jobs` lists them")
        found = await self._watch.report(job.job_id)
        message = job_trends(job, found, self._matmul_flops)
        own = {node for node in job.nodes if node is not None}
        statistics = [each for each in await self._statistics(NODE_DAYS) if each.node_id in own]
        message.nodes.extend(statistics[:_MOST_NODES])
        return message

    async def ListNodeStatistics(
        self, request: trends_pb2.ListNodeStatisticsRequest, context: Context
    ) -> trends_pb2.ListNodeStatisticsResponse:
        """What every node was like over some days, or a page of them."""
        if request.most < 0:
            await bad_field(context, "most", f"is {request.most}; allowed: 0 or more")
        if not 0 <= request.days <= MOST_DAYS:
            allowed = f"1 to {MOST_DAYS}, or 0"
            await bad_field(context, "days", f"is {request.days}; allowed: {allowed}")
        found = await self._statistics(request.days or NODE_DAYS)
        return page_of(found, request)

    async def _statistics(self, num_days: int) -> list[trends_pb2.NodeStatistics]:
        since_s = self._service.now_s - num_days * DAY_S
        documents = self._runs.kept.documents().values()
        runs = await asyncio.to_thread(lambda: [parse(each) for each in documents])
        days = self._watch.node_days(num_days)
        return node_statistics(self._service.state, days, runs, since_s)


def job_trends(
    job: JobRecord, found: History, matmul_flops: Mapping[NodeId, float]
) -> trends_pb2.JobTrends:
    """A job's trends, without its nodes."""
    spec, periods = spec_of(job.spec_json), known_periods(job)
    peak = peak_of(job, matmul_flops)
    return trends_pb2.JobTrends(
        job_id=job.job_id,
        layout=found.hours[-1].layout if found.hours else "",
        speed=_trend(found.speed),
        speed_in_attempts=_trend(found.speed_in_attempts),
        late_launches=_trend(found.late),
        stalls=[_stall(stall, periods) for stall in found.stalls],
        hours=[_hour(hour) for hour in found.hours],
        why_no_trend=found.why_no_trend,
        findings=[each.message for each in findings(found, periods)],
        model_flops_per_token=flops_per_token(spec.model.shape, Convention.WINDOWED),
        peak_flops_per_s=0.0 if peak is None else peak.flops_per_s,
    )


def node_statistics(
    state: State,
    days: Mapping[NodeId, NodeDay],
    runs: Iterable[diagnostics_pb2.DiagnosticRun],
    since_s: float,
) -> list[trends_pb2.NodeStatistics]:
    """Of every node that the fleet has, those that are often the slowest first."""
    faults, notes = Counter[str](), Counter[str]()
    checks, failed = Counter[str](), Counter[str]()
    for incident in state.incidents.values():
        if incident.opened_s < since_s:
            continue
        (notes if incident.is_note else faults).update(incident.culprits)
        checks.update(node for node, _ in incident.findings)
        failed.update(node for node, verdict in incident.findings if verdict == CheckVerdict.FAIL)
    for run in runs:
        # What looked for the cause of an incident is among its findings.
        if run.started_s < since_s or run.origin in state.incidents:
            continue
        checks.update(each.node for each in run.node_reports)
        reports = run.node_reports
        failed.update(each.node for each in reports if each.verdict == CheckVerdict.FAIL)
    found = [
        trends_pb2.NodeStatistics(
            node_id=node,
            num_windows=day.num_windows,
            slowest_ratio=day.slowest_ratio,
            expected_ratio=day.expected_ratio,
            work_ratio=day.work_ratio,
            last_ratio=day.last_ratio,
            is_slow=day.is_slow(len(state.nodes)),
            service_s=day.service_s,
            num_faults=faults[node],
            num_notes=notes[node],
            num_checks=checks[node],
            num_checks_failed=failed[node],
        )
        for node in state.nodes
        for day in (days.get(node, NodeDay()),)
    ]
    return sorted(found, key=place_of)


def page_of(
    found: Iterable[trends_pb2.NodeStatistics], request: trends_pb2.ListNodeStatisticsRequest
) -> trends_pb2.ListNodeStatisticsResponse:
    """Of nodes in their order those that are asked for."""
    nodes = [each for each in found if request.node in ("", each.node_id)]
    if not request.most:
        return trends_pb2.ListNodeStatisticsResponse(nodes=nodes)
    nodes = [each for each in nodes if place_of(each) > request.after]
    page = nodes[: request.most]
    following = place_of(page[-1]) if len(nodes) > len(page) else ""
    return trends_pb2.ListNodeStatisticsResponse(nodes=page, next=following)


def place_of(node: trends_pb2.NodeStatistics) -> str:
    """Where a node is in the order; of a node that is gone, too, when the next page is asked."""
    # Ratios of windows, of which there are thousands: more digits tell nothing apart.
    return f"{not node.is_slow:d}-{1 - node.slowest_ratio:.6f}-{node.node_id}"


def _trend(found: Trend | None) -> trends_pb2.Trend | None:
    if found is None:
        return None
    return trends_pb2.Trend(
        per_week=found.per_week,
        low=found.low,
        high=found.high,
        p_value=found.p_value,
        is_significant=found.is_significant,
        level=found.level,
        ratio_per_week=found.ratio_per_week,
        lost_ratio=found.lost_ratio,
        num_points=found.num_points,
        span_s=found.span_s,
    )


def _stall(found: PeriodicStall, periods: Mapping[str, int]) -> trends_pb2.PeriodicStall:
    return trends_pb2.PeriodicStall(
        period=found.period,
        is_of_steps=found.is_of_steps,
        last_step=found.last_step,
        last_s=found.last_s,
        num_hits=found.num_hits,
        num_expected=found.num_expected,
        stall_s=found.stall_s,
        lost_ratio=found.lost_ratio,
        p_value=found.p_value,
        description=describe(found, periods),
    )


def _hour(hour: Hour) -> trends_pb2.TrainedHour:
    return trends_pb2.TrainedHour(
        begun_s=hour.begun_s,
        attempt=hour.attempt,
        num_steps=hour.num_steps,
        tokens_per_s=hour.tokens_per_s,
        step_s=hour.step_s,
        spread_s=hour.spread_s,
        late_s=hour.late_s,
    )
