"""What days and weeks of training show; see `outlast trends`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from controller.core.records import JobRecord
from controller.core.states import AWAY
from controller.families import Family, Gauge
from controller.trends.watch import known_periods
from controller.web.metrics.sources import Sources
from diagnostics.core.history import History, setting_of
from diagnostics.core.trends import Trend
from outlast.ids import JobId

_BY_JOB = ("job_id",)
_OTHER = "other"

MFU_TREND = Gauge(
    "outlast_job_mfu_trend_ratio",
    "Change of MFU a week as a share of it, over up to two weeks of one layout; 0 while it is no "
    "more than chance, absent before a day. scope job: over all; attempts: within each attempt",
    (*_BY_JOB, "scope"),
)
STALLS = Gauge(
    "outlast_job_periodic_stall_ratio",
    "Share of the time of the newest steps that goes into steps that are slow at a regular period, "
    "by the setting that has the same period; `other` where none has",
    (*_BY_JOB, "setting"),
)
LATE = Gauge(
    "outlast_job_late_launch_ratio",
    "Share of a step for which a rank waits for replicas that enter an operation late, in the "
    "last hour that is over",
    _BY_JOB,
)
LATE_TREND = Gauge(
    "outlast_job_late_launch_trend_ratio",
    "Change a week of outlast_job_late_launch_ratio; 0 while it is no more than chance",
    _BY_JOB,
)
SLOWEST = Gauge(
    "outlast_node_slowest_ratio",
    "Share of windows of ten minutes, of the last week, in which the node's ranks worked longest "
    "among the nodes of their job",
    ("node",),
)
SLOW = Gauge(
    "outlast_node_slow",
    "1 where the node's ranks worked over 3 % longer than those of its job's other nodes in the "
    "mean of the last week, and longest more often than chance",
    ("node",),
)
LAST = Gauge(
    "outlast_node_last_to_enter_ratio",
    "Share of the operations with replicas, of the last week, that one of the node's ranks was "
    "the last to enter",
    ("node",),
)
FAMILIES: tuple[Family, ...] = (MFU_TREND, STALLS, LATE, LATE_TREND, SLOWEST, SLOW, LAST)


def collect(sources: Sources) -> Iterator[Metric]:
    """The families of this subject."""
    shown = {job.job_id for job in sources.shown_jobs()}
    known = [(job, found) for job, found in sources.trends.known().items() if job in shown]
    yield MFU_TREND.of(
        ((job, scope), each.ratio_per_week if each.is_significant else 0.0)
        for job, found in known
        for scope, each in (("job", found.speed), ("attempts", found.speed_in_attempts))
        if each is not None
    )
    jobs = sources.service.state.jobs
    yield STALLS.of(
        ((job, setting), ratio)
        for job, found in known
        for setting, ratio in _stalls(jobs[job], found).items()
    )
    yield LATE.of(_lates(known))
    yield LATE_TREND.of(
        ((job,), _if_significant(found.late)) for job, found in known if found.late is not None
    )
    nodes = sources.service.state.nodes
    days = [
        (node, day)
        for node, day in sources.trends.newest_node_days.items()
        if node in nodes and nodes[node].state not in AWAY and day.num_windows
    ]
    yield SLOWEST.of(((node,), day.slowest_ratio) for node, day in days)
    yield SLOW.of(((node,), float(day.is_slow(len(nodes)))) for node, day in days)
    yield LAST.of(((node,), day.last_ratio) for node, day in days)


def _stalls(job: JobRecord, found: History) -> dict[str, float]:
    """By setting, of which there is no stall, too: a series that begins with it has no rise."""
    periods = known_periods(job)
    ratios = dict.fromkeys((*periods, _OTHER), 0.0)
    for stall in found.stalls:
        ratios[setting_of(stall, periods) or _OTHER] += stall.lost_ratio
    return ratios


def _lates(known: list[tuple[JobId, History]]) -> Iterator[tuple[tuple[str], float]]:
    for job, found in known:
        if found.hours and (ratio := found.hours[-1].late_ratio) is not None:
            yield (job,), ratio


def _if_significant(found: Trend) -> float:
    return found.per_week if found.is_significant else 0.0
