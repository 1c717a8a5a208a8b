"""One line per event, in columns: virtual time, who, which, what."""

from __future__ import annotations

from controller.core.changes import (
    CommandClosed,
    CommandOpened,
    IncidentPut,
    JobPut,
    NodeForgotten,
    NodePut,
    StateChange,
)
from controller.core.records import JobRecord
from controller.sim.timeline import EPOCH_S, Timeline
from outlast.ids import JobId
from outlast.v1 import agents_pb2


class Tracer:
    """Prints what happens when it is on; counts what was seen in any case."""

    def __init__(self, timeline: Timeline, *, on: bool) -> None:
        self._timeline = timeline
        self.on = on
        self.num_lines = 0
        self._last: dict[str, str] = {}
        self._sizes: dict[JobId, int] = {}
        # How often each state was entered and each verdict reached.
        self.seen: dict[str, int] = {}

    def line(self, who: str, which: str, what: str) -> None:
        """A line of the trace."""
        self.num_lines += 1
        if self.on:
            at_s = self._timeline.now_s - EPOCH_S
            print(f"{at_s:12.3f}  {who:<8} {which:<22} {what}")

    def message(self, message: agents_pb2.AgentMessage | agents_pb2.ControllerMessage) -> None:
        """A message between an agent and the controller: its kind, and that of what it brings."""
        kind: str = message.WhichOneof("kind") or ""
        if kind in ("event", "command"):
            kind = f"{kind}.{getattr(message, kind).WhichOneof('kind')}"
        self._count(f"message {kind}")

    def overtaken(self, job: JobId) -> None:
        """Who holds up a job was worked out too late: it hangs no more, or was stopped."""
        self._count("answer overtaken")
        self.line("edge", job, "who holds it up does not matter any more")

    def change(self, change: StateChange) -> None:
        """A change of the journal; a line when a state changes."""
        match change:
            case JobPut(job=job):
                self._state("job", job.job_id, str(job.state), f"a{job.attempt} {job.reason}")
                self._size(job)
            case NodePut(node=node):
                self._state("node", node.node, str(node.state), node.reason)
            case NodeForgotten(node=node_id):
                self._last.pop(f"node {node_id}", None)
                self.line("node", node_id, "forgotten")
            case IncidentPut(incident=incident):
                action = "" if incident.action is None else f":{incident.action}"
                what = f"{incident.state}{action}"
                self._state("incident", incident.incident, what, incident.reason)
                if self._last.get(f"cause {incident.incident}") != incident.cause:
                    self._last[f"cause {incident.incident}"] = incident.cause
                    self._count(f"cause {incident.cause}")
            case CommandOpened(command=command):
                self.line("command", command.node, command.command_id)
            case CommandClosed(command_id=command_id, why=why) if self.on:
                self.line("command", "", f"{command_id} closed: {why}")

    def _size(self, job: JobRecord) -> None:
        """Note that a job goes on with fewer nodes, or with more."""
        nodes = job.plan.nodes
        before = self._sizes.setdefault(job.job_id, nodes)
        if nodes != before:
            self._sizes[job.job_id] = nodes
            change = "shrinks" if nodes < before else "grows"
            self._count(f"job {change}")
            self.line("job", job.job_id, f"{change}: {before} -> {nodes} nodes")

    def _state(self, kind: str, name: str, state: str, why: str) -> None:
        if self._last.get(f"{kind} {name}") != state:
            self._last[f"{kind} {name}"] = state
            self._count(f"{kind} {state}")
            self.line(kind, name, f"{state}: {why}")

    def _count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1
