"""The Diagnostics service: runs that a person asks for, and those that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from controller.core.changes import State
from controller.core.records import JobRecord
from controller.core.states import AT_WORK
from controller.diagnosis.run import MANUAL, Request
from controller.diagnosis.runs import DiagnosticRuns, NodeBusyError, new_run_id
from controller.grpc_errors import Context, bad_field, not_found, refused
from controller.service import Service
from controller.sessions.session import Sessions
from controller.store.diagnoses import MAX_KEPT, parse
from diagnostics.core.plans import SUITES
from outlast.ids import JobId, NodeId
from outlast.v1 import diagnostics_pb2
from outlast.v1.diagnostics_pb2_grpc import DiagnosticsServicer

_KEPT_HINT = f"`outlast diagnose --list` shows the last {MAX_KEPT}"


class DiagnosticsService(DiagnosticsServicer):
    """Checks nodes by hand."""

    def __init__(self, service: Service, sessions: Sessions, runs: DiagnosticRuns) -> None:
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
        state = self._service.state
        jobs = {node: job for node in nodes if (job := _job_on(state, node)) is not None}
        training = [node for node, job in jobs.items() if job.state in AT_WORK]
        urls = {node: job.checkpoint_url for node, job in jobs.items()}
        if request.job_id:
            # Its nodes may be free: it may be paused, or over.
            urls = dict.fromkeys(nodes, state.jobs[JobId(request.job_id)].checkpoint_url)
        try:
            progress = self._runs.start(
                Request(
                    run_id=new_run_id(),
                    suite=suite,
                    origin=MANUAL,
                    nodes=tuple(nodes),
                    addresses={node: state.nodes[node].address for node in nodes},
                    checkpoint_urls=urls,
                    disturbed=frozenset(training),
                )
            )
        except NodeBusyError as error:
            await refused(context, str(error), reason="NODE_BUSY")
        warnings = [
            f"{node} trains {jobs[node].job_id}: the checks slow it down, and slow values there "
            "prove nothing; `outlast pause` it first for a fair measurement"
            for node in training
        ]
        progress.notes.extend(warnings)
        return diagnostics_pb2.RunDiagnosticsResponse(
            run_id=progress.request.run_id, nodes=nodes, warnings=warnings
        )

    async def WatchDiagnostics(
        self, request: diagnostics_pb2.WatchDiagnosticsRequest, context: Context
    ) -> AsyncIterator[diagnostics_pb2.WatchDiagnosticsResponse]:
        """Findings as they come, those so far at once; ends with the run and its report."""
        run = self._runs.get(request.run_id)
        if run is None:
            await not_found(context, "run", request.run_id, _KEPT_HINT)
        sent = 0
        while True:
            seen = run.changes.version
            result = None
            if run.result is not None:
                result = diagnostics_pb2.DiagnosticRun()
                result.CopyFrom(run.result)
                del result.findings[:]
            # More may come in while this is being sent.
            news = run.findings[sent:]
            sent += len(news)
            yield diagnostics_pb2.WatchDiagnosticsResponse(
                findings=news, pending_nodes=run.pending, phase=run.phase, run=result
            )
            if result is not None:
                return
            await run.changes.wait(seen)

    async def ListDiagnostics(
        self, request: diagnostics_pb2.ListDiagnosticsRequest, context: Context
    ) -> diagnostics_pb2.ListDiagnosticsResponse:
        """The runs that are kept, newest first; or a page of those that checked a node."""
        if request.newest < 0:
            await bad_field(context, "newest", f"is {request.newest}; allowed: 0 or more")
        documents = self._runs.kept.documents(request.node)
        ids = list(documents)
        if request.after:
            if request.after not in documents:
                await bad_field(
                    context, "after", f"is {request.after!r}, which is no run of the list"
                )
            ids = ids[ids.index(request.after) + 1 :]
        page = ids[: request.newest or None]
        runs = await asyncio.to_thread(lambda: [parse(documents[run_id]) for run_id in page])
        if request.node:
            # Its name may be a word that a document has for something else.
            runs = [run for run in runs if request.node in run.nodes]
        return diagnostics_pb2.ListDiagnosticsResponse(
            runs=runs, next=page[-1] if len(page) < len(ids) else ""
        )

    async def GetDiagnostics(
        self, request: diagnostics_pb2.GetDiagnosticsRequest, context: Context
    ) -> diagnostics_pb2.GetDiagnosticsResponse:
        """One run with its findings, all or those of a node."""
        run = self._runs.kept.get(request.run_id)
        if run is None:
            await not_found(context, "run", request.run_id, _KEPT_HINT)
        if request.node:
            for found in (run.findings, run.links):
                own = [each for each in found if request.node in (each.node, each.peer)]
                del found[:]
                found.extend(own)
        return diagnostics_pb2.GetDiagnosticsResponse(run=run)

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
            candidates = sorted(self._sessions.nodes())
        # A node that has just connected is known to the machine a moment later.
        connected = [
            node for node in candidates if self._sessions.is_connected(node) and node in state.nodes
        ]
        if not connected:
            await refused(context, "no such node is connected", reason="NODE_NOT_CONNECTED")
        return connected


def _job_on(state: State, node: NodeId) -> JobRecord | None:
    """The job that holds the node."""
    job = state.nodes[node].job
    return None if job is None else state.jobs.get(job)
