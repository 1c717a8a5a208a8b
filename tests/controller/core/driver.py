"""Drives a machine by hand and tells, line by line, everything that it answers."""

from __future__ import annotations

from typing import assert_never

from controller.core import events as ev
from controller.core.changes import (
    AttemptPut,
    CheckpointStored,
    CheckpointWaited,
    CommandClosed,
    CommandOpened,
    IncidentGrown,
    IncidentPut,
    IncidentsPruned,
    JobExplained,
    JobForgotten,
    JobPruned,
    JobPut,
    NodeChecked,
    NodeForgotten,
    NodePut,
    RanksDone,
    State,
)
from controller.core.effects import (
    Alert,
    Effect,
    EndSearch,
    EvictNode,
    Persist,
    ProvisionNodes,
    SearchFaults,
    SendCommand,
)
from controller.core.incident_cut import IncidentCut
from controller.core.incident_record import IncidentRecord
from controller.core.machine import Machine
from controller.core.node_events import (
    NodeDisconnected,
    NodeFound,
    NodeGone,
    NodeJoined,
    NodeLate,
    NodeLost,
    NodeSilent,
    WorkerExited,
    WorkerStatus,
)
from controller.core.records import JobPlan, JobRecord, NodeRecord
from controller.core.settings import Settings
from controller.core.written import CommandsClosed, CommandsOpened, RecordChanged
from outlast.failures import ErrorKind, FailureClass
from outlast.ids import Attempt, CommandId, JobId, NodeId

JOB = JobId("job")
START_S = 1000.0
# Changes that the journal makes of several.
_WRITTEN = (CommandsOpened, CommandsClosed, RecordChanged)
# Changes with which nothing comes into another state.
_STATELESS = (
    AttemptPut,
    JobExplained,
    NodeChecked,
    JobForgotten,
    RanksDone,
    CheckpointStored,
    CheckpointWaited,
    IncidentGrown,
    JobPruned,
    IncidentsPruned,
    IncidentCut,
)


def story(effects: list[Effect], reported: dict[str, str]) -> list[str]:
    """One line for each effect and for each change that changes where something stands.

    `reported` has the last line of each job, node and incident, and is brought up to date.
    """
    lines: list[str] = []
    for effect in effects:
        match effect:
            case Persist(changes=changes):
                assert effect is effects[0], "the journal comes first"
                for change in changes:
                    if isinstance(change, _STATELESS):
                        continue  # An attempt's beginning is in the job's own line.
                    assert not isinstance(change, _WRITTEN), "only the journal has these"
                    line = _change_line(change)
                    subject = line.split()[0]
                    if reported.get(subject) != line:
                        lines.append(line)
                    if subject not in ("open", "close"):
                        reported[subject] = line
            case SendCommand(command=command):
                lines.append(f"send {command.command_id}")
            case ProvisionNodes(count=count):
                lines.append(f"provision {count}")
            case EvictNode(node=node):
                lines.append(f"evict {node}")
            case SearchFaults(search=search, nodes=nodes):
                lines.append(f"search {search} {' '.join(nodes)}")
            case EndSearch(search=search):
                lines.append(f"end {search}")
            case Alert():
                lines.append("alert")
            case _:
                assert_never(effect)
    return lines


def _change_line(
    change: JobPut | NodePut | NodeForgotten | IncidentPut | CommandOpened | CommandClosed,
) -> str:
    match change:
        case JobPut(job=job):
            return f"{job.job_id} {job.state} a{job.attempt}"
        case NodePut(node=node):
            return f"{node.node} {node.state}"
        case NodeForgotten(node=forgotten):
            return f"{forgotten} forgotten"
        case IncidentPut(incident=incident):
            return f"{incident.incident} {incident.state}"
        case CommandOpened(command=command):
            return f"open {command.command_id}"
        case CommandClosed(command_id=command_id):
            return f"close {command_id}"


def make_plan(**changes: object) -> JobPlan:
    """Two nodes with one worker each and a spare, unless told otherwise."""
    values: dict[str, object] = {
        "nodes": 2,
        "workers_per_node": 1,
        "standby": 0,
        "total_steps": 100,
        "retry_budget": 3,
        "in_place_restarts": 1,
        "first_step_timeout_s": 1800.0,
        "stop_timeout_s": 60.0,
        "preflight_timeout_s": 300.0,
        "diagnose_timeout_s": 600.0,
    }
    return JobPlan(**{**values, **changes})  # type: ignore[arg-type]  # checked by JobPlan itself


class Driver:
    """A machine, its clock, and short words for what happens to it."""

    def __init__(self, state: State | None = None, settings: Settings | None = None) -> None:
        self.machine = Machine(state, settings)
        self.now_s = START_S
        self._reported: dict[str, str] = {}

    # What happens

    def send(self, event: ev.Event) -> list[str]:
        """The story of one event."""
        return story(self.machine.handle(event, self.now_s), self._reported)

    def wait(self, seconds: float) -> list[str]:
        """Let time pass, waking the machine whenever it asked for it."""
        end_s = self.now_s + seconds
        lines: list[str] = []
        for _ in range(1000):
            wake_s = self.machine.wake_at()
            if wake_s is None or wake_s > end_s:
                break
            self.now_s = max(self.now_s, wake_s)
            lines += self.send(ev.TimePassed())
        else:
            raise AssertionError(f"wake_at stays at {self.machine.wake_at()}")
        self.now_s = end_s
        return lines

    def join(
        self,
        node: str,
        statuses: tuple[WorkerStatus, ...] = (),
        incarnation: str = "one",
        **more: object,
    ) -> list[str]:
        return self.send(
            NodeJoined(
                node=NodeId(node),
                incarnation=incarnation,
                address=f"{node}.example",
                rendezvous_port=4242,
                workers=1,
                statuses=statuses,
                **more,  # type: ignore[arg-type]  # as the test gives them
            )
        )

    def submit(self, job: JobId = JOB, **changes: object) -> list[str]:
        return self.send(
            ev.JobSubmitted(
                job_id=job,
                name=job,
                request_id=f"request of {job}",
                spec_json="{}",
                checkpoint_url="memory://",
                plan=make_plan(**changes),
            )
        )

    def answer(self, command_id: str, **changes: object) -> list[str]:
        """The result of a command, good unless told otherwise."""
        return self.send(self.finished(command_id, **changes))

    def finished(self, command_id: str, **changes: object) -> ev.CommandFinished:
        """The answer to a command."""
        record = self.machine.state.commands[CommandId(command_id)]
        values: dict[str, object] = {
            "command_id": record.command_id,
            "node": record.node,
            "ok": True,
            "error_kind": "",
            "detail": "",
            "verdict": "pass" if "/suite/" in command_id else "",
        }
        values |= changes
        values["error_kind"] = ErrorKind(str(values["error_kind"]))
        return ev.CommandFinished(**values)  # type: ignore[arg-type]

    def answer_all(self, part: str) -> list[str]:
        """Good results for every open command whose id has this part."""
        ids = [command_id for command_id in self.machine.state.commands if part in command_id]
        return [line for command_id in ids for line in self.answer(command_id)]

    def exited(self, rank: int = 0, **changes: object) -> WorkerExited:
        """The end of a rank of the present attempt: killed, unless told otherwise."""
        job = self.job()
        node = job.nodes[rank // job.plan.workers_per_node]
        assert node is not None
        values: dict[str, object] = {
            "job_id": job.job_id,
            "attempt": job.attempt,
            "node": node,
            "rank": rank,
            "code": -9,
            "fault_class": "killed_by_signal",
            "fingerprint": "",
            "detail": "killed by SIGKILL",
            "traceback": "",
            # Who ends well has done all steps, unless told otherwise.
            "completed_step": job.plan.total_steps if changes.get("code") == 0 else 10,
            "at_s": self.now_s,
        }
        values |= changes
        values["fault_class"] = FailureClass(str(values["fault_class"]))
        return WorkerExited(**values)  # type: ignore[arg-type]

    def advanced(self, completed_step: int, resumed_step: int = 0) -> list[str]:
        return self.send(
            ev.JobAdvanced(
                job_id=JOB,
                attempt=self.job().attempt,
                completed_step=completed_step,
                resumed_step=resumed_step,
                at_s=self.now_s,
            )
        )

    def searched(
        self,
        verdicts: dict[str, str] | None = None,
        *,
        links: tuple[tuple[str, str], ...] = (),
        figures: dict[str, float] | None = None,
        search: str = "",
    ) -> list[str]:
        """The end of the job's search: everybody passes unless told otherwise."""
        job = self.job()
        found = tuple(
            NodeFound(
                node=node,
                verdict=(verdicts or {}).get(node, "pass"),
                detail="",
                figure=(figures or {}).get(node),
            )
            for node in dict.fromkeys((*job.nodes, *map(NodeId, verdicts or ())))
            if node is not None
        )
        return self.send(
            ev.FaultsSearched(
                search=search or f"{job.incident}.d1",
                job_id=job.job_id,
                nodes=found,
                links=tuple((NodeId(one), NodeId(other)) for one, other in links),
            )
        )

    def lose(self, node: str, *, gone: bool = True) -> list[str]:
        """A node falls silent for good; the cluster confirms it or it does not."""
        lines = self.send(NodeDisconnected(node=NodeId(node)))
        lines += self.send(NodeLate(node=NodeId(node), silent_s=6.0))
        lines += self.send(NodeLost(node=NodeId(node), silent_s=15.0))
        if gone:
            gone_event = NodeGone(node=NodeId(node), detail="terminated", at_s=self.now_s)
            return lines + self.send(gone_event)
        return lines + self.send(NodeSilent(node=NodeId(node), silent_s=60.0))

    # Where things stand

    def job(self, job: JobId = JOB) -> JobRecord:
        return self.machine.state.jobs[job]

    def node(self, node: str) -> NodeRecord:
        return self.machine.state.nodes[NodeId(node)]

    def incident(self, number: int = 1) -> IncidentRecord:
        return next(
            i for i in self.machine.state.incidents.values() if i.incident[-1] == f"{number}"
        )

    # Common beginnings

    def starting(self, spares: int = 1, **changes: object) -> Driver:
        """A fleet, and a job whose workers are about to start."""
        nodes = int(str(changes.get("nodes", 2)))
        for number in range(1, nodes + spares + 1):
            self.join(f"n{number}")
        self.submit(**changes)
        self.answer_all("/suite/")
        return self

    def running(self, spares: int = 1, **changes: object) -> Driver:
        """A job that trains and has committed nothing yet."""
        self.starting(spares, **changes)
        self.answer_all("/start/")
        self.advanced(1)
        self.now_s += 100.0
        return self

    def commit(self, step: int, *, is_behind: bool = False) -> list[str]:
        return self.send(ev.CheckpointCommitted(job_id=JOB, step=step, is_behind=is_behind))

    def attempt(self) -> Attempt:
        return self.job().attempt
