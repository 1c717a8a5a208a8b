"""The Diagnostics service: suites that a person asks for, on any connected node.

Runs live in memory only: they decide nothing, and whoever asked is waiting.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterable
from functools import partial

from controller.rpc.errors import Context, bad_field, not_found, refused
from controller.rpc.sessions import Sessions
from controller.service import Changes, Service
from diagnostics.core.finding import Verdict
from diagnostics.core.plans import SUITES
from outlast.ids import JobId, NodeId
from outlast.v1 import agents_pb2, diagnostics_pb2
from outlast.v1.diagnostics_pb2_grpc import DiagnosticsServicer

# Runs that can still be watched; the oldest are forgotten.
MAX_RUNS = 64
MAX_FINDINGS = 10_000
# On top of the checks' own deadlines: starting an interpreter with torch on a busy node.
START_ALLOWANCE_S = 60.0


class _Run:
    def __init__(self, nodes: Iterable[NodeId]) -> None:
        self.pending = list(nodes)
        self.findings: list[diagnostics_pb2.Finding] = []
        self.changes = Changes()

    def add(self, findings: Iterable[diagnostics_pb2.Finding]) -> None:
        room = MAX_FINDINGS - len(self.findings)
        self.findings.extend(list(findings)[:room])
        self.changes.fire()

    def done(self, node: NodeId) -> None:
        if node in self.pending:
            self.pending.remove(node)
            self.changes.fire()

    def give_up(self, node: NodeId, suite: str, why: str) -> None:
        """The node will not answer any more."""
        if node in self.pending:
            broken = diagnostics_pb2.Finding(
                test=suite, node=node, verdict=str(Verdict.ERROR), detail=why
            )
            self.add([broken])
            self.done(node)


class DiagnosticsRuns:
    """The runs of late, and the routing of what agents find."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._runs: dict[str, _Run] = {}
        sessions.on_closed(self._node_left)

    def start(self, suite: str, nodes: list[NodeId]) -> str:
        """Ask these connected nodes for a suite; the id of the run."""
        timeout_s = sum(check.deadline_s for check in SUITES[suite].checks)
        run_id = uuid.uuid4().hex[:12]
        run = self._runs[run_id] = _Run(nodes)
        while len(self._runs) > MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        ask = agents_pb2.ManualDiagnostics(run_id=run_id, suite=suite, timeout_s=timeout_s)
        loop = asyncio.get_running_loop()
        for node in nodes:
            if not self._sessions.send(node, agents_pb2.ControllerMessage(diagnostics=ask)):
                run.give_up(node, suite, "the node is not connected")
            late = partial(run.give_up, node, suite, "the node did not answer in time")
            loop.call_later(timeout_s + START_ALLOWANCE_S, late)
        return run_id

    def get(self, run_id: str) -> _Run | None:
        return self._runs.get(run_id)

    def deliver(self, node: NodeId, report: agents_pb2.FindingsReport) -> None:
        """Findings from an agent."""
        run = self._runs.get(report.run_id)
        if run is None or node not in run.pending:
            return
        run.add(report.findings)
        if report.done:
            run.done(node)

    def _node_left(self, node: NodeId) -> None:
        for run in self._runs.values():
            run.give_up(node, "session", "the agent's session ended before its checks did")


class DiagnosticsService(DiagnosticsServicer):
    """Runs checks by hand."""

    def __init__(self, service: Service, sessions: Sessions, runs: DiagnosticsRuns) -> None:
        self._service = service
        self._sessions = sessions
        self._runs = runs

    async def RunDiagnostics(
        self, request: diagnostics_pb2.RunDiagnosticsRequest, context: Context
    ) -> diagnostics_pb2.RunDiagnosticsResponse:
        """Start a suite on the nodes named, those of a job, or all that are connected."""
        suite = request.suite or "preflight"
        if suite not in SUITES:
            allowed = ", ".join(SUITES)
            await bad_field(context, "suite", f"is {suite!r}; allowed: {allowed}")
        nodes = await self._targets(request, context)
        run_id = self._runs.start(suite, nodes)
        return diagnostics_pb2.RunDiagnosticsResponse(run_id=run_id, nodes=nodes)

    async def WatchDiagnostics(
        self, request: diagnostics_pb2.WatchDiagnosticsRequest, context: Context
    ) -> AsyncIterator[diagnostics_pb2.WatchDiagnosticsResponse]:
        """Findings as they come, those so far at once; ends with the run."""
        run = self._runs.get(request.run_id)
        if run is None:
            await not_found(
                context,
                "run",
                request.run_id,
                "the last ones only are kept, and none over restarts",
            )
        sent = 0
        while True:
            seen = run.changes.version
            # More may come in while this is being sent.
            news, is_over = run.findings[sent:], not run.pending
            sent += len(news)
            yield diagnostics_pb2.WatchDiagnosticsResponse(findings=news, pending_nodes=run.pending)
            if is_over:
                return
            await run.changes.wait(seen)

    async def _targets(
        self, request: diagnostics_pb2.RunDiagnosticsRequest, context: Context
    ) -> list[NodeId]:
        state = self._service.state
        if request.nodes:
            wanted = [NodeId(node) for node in dict.fromkeys(request.nodes)]
            for node in wanted:
                if node not in state.nodes:
                    await not_found(context, "node", node, "`outlast nodes` lists them")
                if not self._sessions.is_connected(node):
                    await refused(
                        context, f"node {node} is not connected", reason="NODE_NOT_CONNECTED"
                    )
            return wanted
        if request.job_id:
            job = state.jobs.get(JobId(request.job_id))
            if job is None:
                await not_found(context, "job", request.job_id, "`outlast jobs` lists them")
            candidates = [node for node in job.nodes if node is not None]
        else:
            candidates = list(self._sessions.nodes())
        connected = [node for node in candidates if self._sessions.is_connected(node)]
        if not connected:
            await refused(context, "no such node is connected", reason="NODE_NOT_CONNECTED")
        return connected
