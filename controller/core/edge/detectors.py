"""What is found in figures while jobs train, and what is said of their hosts.

Steps and heartbeats update the tables of `diagnostics.core`, and only changes come out as
events. A job's `detectors` section says which are looked for and whether they act.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from controller.core.changes import State
from controller.core.detections import HOST_CAUSES
from controller.core.edge.reports import RanksByAttempt
from controller.core.edge.settings import SettingsTable
from controller.core.edge.use_windows import Found, UseWindows
from controller.core.events import Detected, DetectionEnded, Event
from controller.core.kinds import Cause
from controller.core.node_events import NodeClosed
from controller.core.records import JobRecord
from controller.core.states import AT_WORK, TERMINAL, IncidentState, JobState
from diagnostics.core.curves import CALM_STEPS, SpeedWatch, SpikeWatch, Step, not_a_number
from outlast.ids import Attempt, JobId, NodeId
from outlast.v1 import agents_pb2, common_pb2

# An odd step is over after so long without another: on a healthy tiny job 105 came in 7 minutes.
CALM_S = 600.0
# While odd steps keep coming they are counted here and reported together.
REPORT_PERIOD_S = 10.0
_OF_STEPS = (Cause.NON_FINITE, Cause.SPIKE)


@dataclass(slots=True)
class _Odd:
    """Odd steps of one kind, while their incident is open."""

    last_s: float
    reported_s: float
    # Steps without one since then.
    calm_steps: int = 0
    # Found since they were last reported, and what was said of the newest.
    unreported: int = 0
    message: str = ""


@dataclass(slots=True)
class _Tables:
    """Of one attempt."""

    attempt: Attempt
    uses: UseWindows
    speed: SpeedWatch
    spikes: SpikeWatch = field(default_factory=SpikeWatch)
    odd: dict[Cause, _Odd] = field(default_factory=dict)
    # Whether hosts that were broken before the attempt began have been reported to it.
    knows_hosts: bool = False


class Detectors:
    """The tables of every running job."""

    def __init__(self, state: State, settings: SettingsTable) -> None:
        self._state = state
        self._settings = settings
        self._tables: dict[JobId, _Tables] = {}
        # Ranks, and their best window of steps: attempts of as many ranks are held against it.
        self._best_steps_s: dict[JobId, tuple[int, float | None]] = {}
        # What the cluster says of hosts that are broken.
        self._broken: dict[NodeId, str] = {}

    def steps(self, event: agents_pb2.AgentEvent) -> list[Event]:
        """Figures of completed steps."""
        job = self._running(JobId(event.job_id))
        if job is None:
            return []
        tables = self._tables_of(job)
        events: list[Event] = []
        for report in event.step_reports.reports:
            # Without tokens, the step was passed without its batch.
            if (report.attempt or event.attempt) != job.attempt or not report.tokens:
                continue
            step = Step(
                step=report.step,
                loss=report.loss,
                grad_norm=report.grad_norm,
                duration_s=report.duration_s,
            )
            # A worker that finds NaN or Inf has ended by itself when that is to be acted on.
            message = not_a_number(step)
            events += self._odd(job, tables, Cause.NON_FINITE, message, report, may_act=False)
            message = tables.spikes.take(step)
            may_act = tables.spikes.is_of_loss
            events += self._odd(job, tables, Cause.SPIKE, message, report, may_act=may_act)
            change = tables.speed.take(step)
            self._best_steps_s[job.job_id] = (job.plan.world_size, tables.speed.best_s)
            events += self._changed(job, Cause.SLOWDOWN, change, tables.speed.message, report.at_s)
        return events

    def heartbeat(self, attempts: RanksByAttempt, at_s: float, now_s: float) -> list[Event]:
        """What ranks say of their last steps."""
        events: list[Event] = []
        for job_id in dict.fromkeys(job_id for job_id, _ in attempts):
            job = self._running(job_id)
            if job is None:
                continue
            tables = self._tables_of(job)
            if not tables.knows_hosts:
                tables.knows_hosts = True
                for node in job.nodes:
                    if node is not None and node in self._broken:
                        events += self._condition(job, node, at_s)
            for summary in attempts.get((job_id, job.attempt), ()):
                if summary.HasField("use"):
                    tables.uses.note(summary.rank, summary.use)
            found = tables.uses.judge(job.plan.world_size, now_s)
            if found is not None:
                events += self._of_ranks(job, found, at_s)
        return events

    def host(self, node: NodeId, event: agents_pb2.AgentEvent) -> list[Event]:
        """What an agent says of its node: of interest to the job that runs there."""
        sign = event.host_sign
        if sign.subject == Cause.SILENT_CORRUPTION:
            return self._memory_damaged(node, event)
        job = self._job_on(node)
        if job is None or sign.subject not in HOST_CAUSES:
            return []
        if event.job_id and (event.job_id, event.attempt) != (job.job_id, job.attempt):
            return []
        cause = Cause(sign.subject)
        if not sign.message:
            message = f"{sign.what or 'it'} is well again"
            return [DetectionEnded(job_id=job.job_id, cause=cause, node=node, detail=message)]
        message = f"{node}: {sign.message}"
        may_act = not sign.spares_node
        return self._found(job, cause, message, event.at_s, node=node, may_act=may_act)

    def _memory_damaged(self, node: NodeId, event: agents_pb2.AgentEvent) -> list[Event]:
        """Host memory that did not hold what was written: no detector that could be turned off."""
        job = self._state.jobs.get(JobId(event.job_id))
        if job is None:
            return []
        rank = event.host_sign.what.removeprefix("rank ")
        return [
            Detected(
                job_id=job.job_id,
                attempt=job.attempt,
                cause=Cause.SILENT_CORRUPTION,
                node=node,
                rank=int(rank) if rank.isdecimal() else None,
                detail=f"{node}: {event.host_sign.message}",
                at_s=event.at_s,
            )
        ]

    def closed(self, event: NodeClosed, at_s: float) -> list[Event]:
        """What the cluster says of a node's host: of interest to the job that runs there."""
        self._broken.pop(event.node, None)
        if event.is_broken:
            self._broken[event.node] = event.reason
        job = self._job_on(event.node)
        if job is None:
            return []
        if not event.is_broken:
            message = "its host is called well again"
            return [
                DetectionEnded(
                    job_id=job.job_id, cause=Cause.NODE_CONDITION, node=event.node, detail=message
                )
            ]
        return self._condition(job, event.node, at_s)

    def _condition(self, job: JobRecord, node: NodeId, at_s: float) -> list[Event]:
        message = f"{node}: {self._broken[node]}"
        return self._found(job, Cause.NODE_CONDITION, message, at_s, node=node)

    def _job_on(self, node: NodeId) -> JobRecord | None:
        """The job whose workers are there, if any are."""
        record = self._state.nodes.get(node)
        job = None if record is None or record.job is None else self._state.jobs.get(record.job)
        return job if job is not None and job.state in AT_WORK else None

    def _running(self, job_id: JobId) -> JobRecord | None:
        job = self._state.jobs.get(job_id)
        if job is None or job.state is not JobState.RUNNING:
            self._tables.pop(job_id, None)
            if job is None or job.state in TERMINAL:
                self._best_steps_s.pop(job_id, None)
            return None
        return job

    def _tables_of(self, job: JobRecord) -> _Tables:
        tables = self._tables.get(job.job_id)
        if tables is None or tables.attempt != job.attempt:
            layout = self._settings.of(job).layout
            stages: dict[int, list[int]] = {}
            for rank in range(layout.world_size):
                stages.setdefault(layout.coordinate(rank).pp, []).append(rank)
            uses = UseWindows([*stages.values()])
            ranks, best_s = self._best_steps_s.get(job.job_id, (0, None))
            speed = SpeedWatch(best_s if ranks == job.plan.world_size else None)
            odd = self._open_odd(job)
            tables = _Tables(attempt=job.attempt, uses=uses, speed=speed, odd=odd)
            self._tables[job.job_id] = tables
        return tables

    def _open_odd(self, job: JobRecord) -> dict[Cause, _Odd]:
        """Odd steps whose incident an earlier controller has opened: somebody must close it."""
        found = {}
        for incident_id in self._state.index.open_incidents:
            incident = self._state.incidents[incident_id]
            is_its = (incident.job, incident.attempt) == (job.job_id, job.attempt)
            if is_its and incident.state is IncidentState.OPEN and incident.cause in _OF_STEPS:
                last_s = incident.last_s or incident.fault_s
                found[incident.cause] = _Odd(last_s=last_s, reported_s=last_s)
        return found

    def _of_ranks(self, job: JobRecord, found: Found, at_s: float) -> list[Event]:
        """What a window says of single ranks."""
        events: list[Event] = []
        for slow in found.slow:
            node, message = _node_of(job, slow.rank), slow.message
            events += self._found(job, Cause.STRAGGLER, message, at_s, node=node, rank=slow.rank)
        for rank in found.slow_no_more:
            events += self._over(job, Cause.STRAGGLER, _node_of(job, rank))
        for rank, message in found.starved:
            node = _node_of(job, rank)
            events += self._found(job, Cause.DATA_STALL, message, at_s, node=node, rank=rank)
        for rank in found.starved_no_more:
            events += self._over(job, Cause.DATA_STALL, _node_of(job, rank))
        return events

    def _odd(
        self,
        job: JobRecord,
        tables: _Tables,
        cause: Cause,
        message: str,
        report: common_pb2.StepReport,
        *,
        may_act: bool,
    ) -> list[Event]:
        """Something about a single step; over when it has not come back for a while."""
        odd = tables.odd.get(cause)
        if not message:
            return [] if odd is None else self._calm(job, tables, cause, odd, report)
        acts = may_act and self._mode(job, cause) == "act"
        if odd is not None and not acts and report.at_s - odd.reported_s < REPORT_PERIOD_S:
            odd.last_s, odd.calm_steps = report.at_s, 0
            odd.unreported, odd.message = odd.unreported + 1, message
            return []
        count = 1 if odd is None else 1 + odd.unreported
        tables.odd[cause] = _Odd(last_s=report.at_s, reported_s=report.at_s)
        return self._found(
            job, cause, message, report.at_s, step=report.step, may_act=may_act, count=count
        )

    def _calm(
        self,
        job: JobRecord,
        tables: _Tables,
        cause: Cause,
        odd: _Odd,
        report: common_pb2.StepReport,
    ) -> list[Event]:
        """A step without it: what was not reported yet is, and after enough of them it is over."""
        odd.calm_steps += 1
        events: list[Event] = []
        if odd.unreported and report.at_s - odd.reported_s >= REPORT_PERIOD_S:
            events = self._found(
                job, cause, odd.message, odd.last_s, may_act=False, count=odd.unreported
            )
            odd.unreported, odd.reported_s = 0, report.at_s
        if odd.calm_steps >= CALM_STEPS and report.at_s - odd.last_s >= CALM_S:
            del tables.odd[cause]
            events += self._over(job, cause, None)
        return events

    def _changed(
        self, job: JobRecord, cause: Cause, change: bool | None, message: str, at_s: float
    ) -> list[Event]:
        if change is None:
            return []
        return self._found(job, cause, message, at_s) if change else self._over(job, cause, None)

    def _found(
        self,
        job: JobRecord,
        cause: Cause,
        message: str,
        at_s: float,
        *,
        node: NodeId | None = None,
        rank: int | None = None,
        step: int | None = None,
        may_act: bool = True,
        count: int = 1,
    ) -> list[Event]:
        mode = self._mode(job, cause)
        if mode == "off":
            return []
        return [
            Detected(
                job_id=job.job_id,
                attempt=job.attempt,
                cause=cause,
                node=node,
                rank=rank,
                detail=message,
                at_s=at_s,
                acts=mode == "act" and may_act,
                step=step,
                count=count,
            )
        ]

    def _mode(self, job: JobRecord, cause: Cause) -> str:
        # Of storage, it is a worker's log that speaks.
        detector = Cause.WORKER_LOG if cause is Cause.STORAGE else cause
        return self._settings.of(job).modes.get(detector, "log")

    def _over(self, job: JobRecord, cause: Cause, node: NodeId | None) -> list[Event]:
        return [DetectionEnded(job_id=job.job_id, cause=cause, node=node, detail="it is over")]


def _node_of(job: JobRecord, rank: int) -> NodeId | None:
    return job.nodes[rank // job.plan.workers_per_node]
