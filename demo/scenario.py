"""The two runs of the demo: one that is hit twice, and one that is left alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from demo.analysis import FaultKind, Injected, Step
from demo.faults import PlannedFault
from demo.host import Host
from outlast.cli import output
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.follow import Follower, Snapshot
from outlast.cli.view import show

if TYPE_CHECKING:
    from outlast.client import Client
    from outlast.spec import JobSpec
    from outlast.v1.common_pb2 import StepReport
    from outlast.v1.jobs_pb2 import Job

# A step to wait part of when none was timed yet.
_ASSUMED_STEP_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """All that one run left behind."""

    job: dict[str, Any]
    reports: tuple[Step, ...]
    """Every step report that was seen, also of steps that were done again."""
    curve: tuple[Step, ...]
    """The controller's own record: one report a step."""
    incidents: tuple[dict[str, Any], ...]
    faults: tuple[Injected, ...]

    @property
    def succeeded(self) -> bool:
        return bool(self.job["state"] == "SUCCEEDED")

    @property
    def finished_s(self) -> float:
        finished_s = self.job["finished_s"]
        return float(finished_s if finished_s is not None else self.reports[-1].at_s)


class Injector:
    """Hits a running job when its black boxes say that the planned step is done."""

    def __init__(self, host: Host, planned: Sequence[PlannedFault], workers_per_node: int) -> None:
        self._host = host
        self._left = list(planned)
        self._workers_per_node = workers_per_node
        self._started_s = time.time()
        self.done: list[Injected] = []
        self.notes: list[str] = []

    def tick(self, snapshot: Snapshot) -> None:
        """Look whether it is time; called a few times a second."""
        job = snapshot.job
        if not self._left or job.state != "RUNNING" or not all(job.nodes):
            return
        planned = self._left[0]
        injected = (
            self._kill_worker(planned, snapshot)
            if planned.kind is FaultKind.WORKER_KILLED
            else self._lose_node(planned, snapshot)
        )
        if injected is None:
            return
        del self._left[0]
        self.done.append(injected)
        after_s = injected.at_s - self._started_s
        verb = "killed" if planned.kind is FaultKind.WORKER_KILLED else "took away"
        self.notes.append(f"{after_s:.1f} s: the demo {verb} {injected.victim}")

    def _kill_worker(self, planned: PlannedFault, snapshot: Snapshot) -> Injected | None:
        job = snapshot.job
        rank = planned.choose(range(len(job.nodes) * self._workers_per_node))
        node = job.nodes[rank // self._workers_per_node]
        if not self._is_time(planned, snapshot, node, rank):
            return None
        present = self._host.present(node, job.job_id, job.attempt, rank)
        at_s = None if present is None else self._host.kill_worker(present)
        if present is None or at_s is None:
            return None
        return Injected(
            kind=planned.kind,
            at_s=at_s,
            step=present.completed_step,
            node=node,
            rank=rank,
            pids=(present.pid,),
        )

    def _lose_node(self, planned: PlannedFault, snapshot: Snapshot) -> Injected | None:
        job = snapshot.job
        # The state must come from the store, and somebody must take the node's place.
        spare = any(node.state in ("STANDBY", "READY") for node in snapshot.nodes)
        if not job.HasField("committed_step") or not spare:
            return None
        index = planned.choose(range(len(job.nodes)))
        node, rank = job.nodes[index], index * self._workers_per_node
        if not self._is_time(planned, snapshot, node, rank):
            return None
        present = self._host.present(node, job.job_id, job.attempt, rank)
        place = self._host.node(node)
        if present is None or place is None:
            return None
        at_s, pids = self._host.lose_node(place)
        return Injected(
            kind=planned.kind,
            at_s=at_s,
            step=present.completed_step,
            node=node,
            rank=None,
            pids=tuple(pids),
        )

    def _is_time(self, planned: PlannedFault, snapshot: Snapshot, node: str, rank: int) -> bool:
        """Whether the planned step is done; then waits for the drawn part of the next."""
        job = snapshot.job
        present = self._host.present(node, job.job_id, job.attempt, rank)
        if present is None or present.completed_step < planned.after_step:
            return False
        step_s = snapshot.steps[-1].duration_s if snapshot.steps else _ASSUMED_STEP_S
        time.sleep(planned.delay_share * step_s)
        return True


def run(
    host: Host, spec: JobSpec, document: dict[str, Any], planned: Sequence[PlannedFault]
) -> Recorded:
    """Submit the job, show it to its end, hit it as planned, and gather what it left."""
    address = host.start()
    from outlast.access import Access
    from outlast.client import Client

    # Whatever else this person has logged in to.
    nobody = Access()
    with Client(address, access=nobody) as client:
        job = client.submit(document)
        follower = Follower(lambda: Client(address, access=nobody), job)
        injector = Injector(host, planned, spec.workers_per_node)

        def tick(snapshot: Snapshot) -> None:
            host.note_nodes()
            injector.tick(snapshot)

        follower.start()
        try:
            show(follower, notes=injector.notes, tick=tick)
        finally:
            follower.stop()
        recorded = _gather(client, job, follower.snapshot(), injector.done)
    _check_dead(host, injector.done)
    return recorded


def _gather(client: Client, job: Job, last: Snapshot, faults: Sequence[Injected]) -> Recorded:
    final, curve = client.get(job.job_id, with_steps=True)
    return Recorded(
        job=output.facts(final),
        reports=(*(_step(report) for report in last.steps), *(_step(report) for report in curve)),
        curve=tuple(_step(report) for report in curve),
        incidents=tuple(output.facts(incident) for incident in client.incidents(job.job_id)),
        faults=tuple(faults),
    )


def _step(report: StepReport) -> Step:
    return Step(
        step=report.step,
        attempt=report.attempt,
        loss=report.loss,
        duration_s=report.duration_s,
        at_s=report.at_s,
        eval_loss=report.eval_loss if report.HasField("eval_loss") else None,
    )


def _check_dead(host: Host, faults: Sequence[Injected]) -> None:
    """A lost node must stay lost: otherwise nothing was proved."""
    for fault in faults:
        if fault.kind is FaultKind.NODE_LOST and host.node(fault.node) is not None:
            raise CliError(f"{fault.node} came back to life", ExitCode.JOB_FAILED)
