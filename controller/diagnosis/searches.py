"""Searches that the machine asks for after a fault, as runs of diagnostics like any other."""

from __future__ import annotations

from controller.core.effects import SearchFaults
from controller.core.events import FaultsSearched
from controller.core.node_events import NodeFound
from controller.diagnosis.run import Request
from controller.diagnosis.runs import DiagnosticRuns
from controller.service import Service
from diagnostics.core.finding import CheckVerdict
from diagnostics.core.report import NodeReport, Report
from outlast.ids import NodeId

# What the journal keeps of a node's report; the run itself has all of it.
_MAX_DETAIL = 500


class FaultSearches:
    """Begins searches and brings their results to the machine."""

    def __init__(self, runs: DiagnosticRuns) -> None:
        self._runs = runs
        self._service: Service | None = None

    def report_to(self, service: Service) -> None:
        """Whose machine asks."""
        self._service = service

    def begin(self, effect: SearchFaults) -> None:
        """Start the run, unless it is under way."""
        service = self._service
        assert service is not None, "the service performs effects, so it is there"
        everyone = (*effect.nodes, *effect.spares)

        def ended(report: Report) -> None:
            service.post(_event(effect, report))

        request = Request(
            run_id=effect.search,
            suite=effect.suite,
            origin=str(service.state.jobs[effect.job].incident or ""),
            nodes=effect.nodes,
            spares=effect.spares,
            addresses={node: service.state.nodes[node].address for node in everyone},
            # Spares belong to no job, and may not reach its storage.
            checkpoint_urls=dict.fromkeys(effect.nodes, effect.checkpoint_url),
            timeout_s=effect.timeout_s,
        )
        self._runs.start_when_free(request, ended)

    def end(self, search: str) -> None:
        """Stop the run, if it is under way."""
        self._runs.cancel(search)


def _event(effect: SearchFaults, report: Report) -> FaultsSearched:
    return FaultsSearched(
        search=effect.search,
        job_id=effect.job,
        nodes=tuple(_found(node) for node in report.nodes),
        links=tuple((NodeId(one), NodeId(other)) for one, other in report.bad_links),
    )


def _found(report: NodeReport) -> NodeFound:
    verdict, reason = report.verdict.verdict, report.verdict.reason
    if report.is_silent:
        # Its agent is connected and its checks never end: nothing may be started there.
        verdict, reason = CheckVerdict.FAIL, f"its checks did not end in time ({reason})"
    return NodeFound(
        node=NodeId(report.node),
        verdict=str(verdict),
        detail=reason[:_MAX_DETAIL],
        figure=report.figure,
        is_corrupt=report.is_corrupt,
    )
