"""Every run of diagnostics: those that run, and those that are kept.

A node takes part in one run at a time, since two would measure each other and
wait for each other's partners. A person's second run is refused; a run after a
fault waits until the nodes are free, and a person's run cannot keep it waiting for
longer than its own deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

from controller.convert import finding_message
from controller.counters import Counters
from controller.diagnosis.asking import Asking
from controller.diagnosis.run import DiagnosticsRunner, Progress, Request
from controller.sessions.session import Sessions
from controller.store.backend import DiskFullError
from controller.store.diagnoses import DONE, INTERRUPTED, RUNNING, Diagnoses
from diagnostics.core.report import NodeReport, Report
from outlast.clock import Clock
from outlast.errors import FatalError
from outlast.ids import NodeId
from outlast.v1 import agents_pb2, diagnostics_pb2

logger = logging.getLogger(__name__)

# Ended runs that can still be watched from their start.
MAX_ENDED = 16

OnEnd = Callable[[Report], None]


class NodeBusyError(FatalError):
    """Another run is checking one of the nodes."""


class DiagnosticRuns:
    """Starts runs, follows them and keeps what they found."""

    def __init__(
        self, sessions: Sessions, kept: Diagnoses, clock: Clock, counters: Counters
    ) -> None:
        self.asking = Asking(sessions)
        self.kept = kept
        self._clock = clock
        self._tally = counters
        self._live: dict[str, Progress] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        kept.recover()

    def start(self, request: Request) -> Progress:
        """Begin a run for a person.

        Raises:
            NodeBusyError: one of its nodes is in another run.
        """
        busy = self._busy_with(request)
        if busy is not None:
            node, run_id = busy
            raise NodeBusyError(
                f"node {node} is being checked in run {run_id}; follow it with "
                f"`outlast diagnose --show {run_id}`, and try again when it has ended"
            )
        return self._begin(request, None)

    def start_when_free(self, request: Request, on_end: OnEnd) -> None:
        """Begin a run for the machine, once; `on_end` gets its report, if it ends.

        Its time runs from now on, also while it waits for its nodes.
        """
        if request.run_id not in self._live:
            self._begin(request, on_end)

    def cancel(self, run_id: str) -> None:
        """End a run that nobody waits for; what it has found is kept."""
        task = self._tasks.get(run_id)
        if task is not None:
            self._live[run_id].notes.append("ended early: nobody waited for it any more")
            task.cancel()

    def get(self, run_id: str) -> Progress | None:
        """A run of this controller that runs, or ended lately."""
        return self._live.get(run_id)

    def deliver(self, node: NodeId, report: agents_pb2.CheckReport) -> None:
        """Something from an agent."""
        self.asking.deliver(node, report)

    async def close(self) -> None:
        """Drop the runs under way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _busy_with(self, request: Request) -> tuple[NodeId, str] | None:
        for run_id in self._tasks:
            for node in self._live[run_id].request.everyone:
                if run_id != request.run_id and node in request.everyone:
                    return node, run_id
        return None

    def _begin(self, request: Request, on_end: OnEnd | None) -> Progress:
        progress = self._live[request.run_id] = Progress(request=request)
        started_s = self._clock.now_s()
        ends_at = asyncio.get_running_loop().time() + request.timeout_s
        self._keep(_record(progress, state=RUNNING, started_s=started_s))
        task = asyncio.create_task(
            self._run(progress, started_s, ends_at, on_end), name=f"diagnostics-{request.run_id}"
        )
        # Only from here on does it hold its nodes.
        self._tasks[request.run_id] = task
        task.add_done_callback(lambda _: self._ended(request.run_id))
        return progress

    async def _run(
        self, progress: Progress, started_s: float, ends_at: float, on_end: OnEnd | None
    ) -> None:
        request = progress.request
        report: Report | None = None
        try:
            await self._until_free(progress)
            baseline = self.kept.load_baseline()
            runner = DiagnosticsRunner(progress, self.asking, baseline, ends_at=ends_at)
            report = await runner.run()
            self.kept.save_baseline(runner.baseline)
            self._tally.run_ended(request.suite, progress.findings, report)
        except Exception:
            # Our own mistake; it must not take the controller down, nor look like a result.
            logger.exception("diagnostics failed: run=%s", request.run_id)
            progress.notes.append("the run itself failed; the controller's log says how")
        finally:
            progress.pending.clear()
            progress.phase = ""
            progress.result = _record(
                progress,
                state=INTERRUPTED if report is None else DONE,
                started_s=started_s,
                ended_s=self._clock.now_s(),
                report=report,
            )
            self._keep(progress.result)
            progress.changes.fire()
        if report is not None and on_end is not None:
            on_end(report)

    async def _until_free(self, progress: Progress) -> None:
        """Wait for older runs that hold some of the nodes."""
        older = list(self._tasks)
        older = older[: older.index(progress.request.run_id)]
        for run_id in older:
            others = self._live[run_id].request.everyone
            task = self._tasks.get(run_id)
            if task is not None and set(others) & set(progress.request.everyone):
                progress.enter(f"waiting for run {run_id} to end")
                await asyncio.wait([task])

    def _ended(self, run_id: str) -> None:
        del self._tasks[run_id]
        ended = [name for name in self._live if name not in self._tasks]
        for name in ended[:-MAX_ENDED]:
            del self._live[name]

    def _keep(self, run: diagnostics_pb2.DiagnosticRun) -> None:
        try:
            self.kept.put(run)
        except DiskFullError as error:
            # Results decide nothing after their run.
            logger.warning("diagnostics not kept: run=%s %s", run.run_id, error)


def new_run_id() -> str:
    """An id for a run that a person asks for."""
    return uuid.uuid4().hex[:12]


def _record(
    progress: Progress,
    *,
    state: str,
    started_s: float,
    ended_s: float | None = None,
    report: Report | None = None,
) -> diagnostics_pb2.DiagnosticRun:
    request = progress.request
    nodes = () if report is None else report.nodes
    links = () if report is None else report.links
    return diagnostics_pb2.DiagnosticRun(
        run_id=request.run_id,
        suite=request.suite,
        state=state,
        origin=request.origin,
        started_s=started_s,
        ended_s=ended_s,
        nodes=request.everyone,
        node_reports=[_node_report(item) for item in nodes],
        links=[finding_message(found) for found in links],
        notes=progress.notes,
        findings=progress.findings,
    )


def _node_report(item: NodeReport) -> diagnostics_pb2.NodeReport:
    return diagnostics_pb2.NodeReport(
        node=item.node,
        verdict=str(item.verdict.verdict),
        reason=item.verdict.reason,
        figure=item.figure,
    )
