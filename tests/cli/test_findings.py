"""What a run of diagnostics says to people."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.cli import describe_incident, findings
from outlast.v1 import diagnostics_pb2, incidents_pb2


def link(verdict: str, **changes: Any) -> diagnostics_pb2.Finding:
    values: dict[str, Any] = {
        "test": "pair",
        "node": "n1",
        "peer": "n3",
        "metric": "all_reduce_bandwidth",
        "value": 0.0024,
        "unit": "GB/s",
        "threshold": 0.05,
        "threshold_source": "peers",
        "verdict": verdict,
        "detail": "tried 3 times",
    }
    return diagnostics_pb2.Finding(**{**values, **changes})


def run(*links: diagnostics_pb2.Finding, **verdicts: str) -> diagnostics_pb2.DiagnosticRun:
    """A finished run with these links, and nodes by verdict."""
    return diagnostics_pb2.DiagnosticRun(
        run_id="r1",
        suite="preflight",
        origin="manual",
        state="done",
        nodes=list(verdicts),
        node_reports=[
            diagnostics_pb2.NodeReport(node=node, verdict=verdict, reason="why")
            for node, verdict in verdicts.items()
        ],
        links=links,
        notes=["3 of 10 links were tested"],
        findings=[
            diagnostics_pb2.Finding(
                test="gpu", node="n1", verdict="skip", detail="no NVIDIA driver"
            ),
            diagnostics_pb2.Finding(test="memory", node="n1", verdict="pass", detail="fine"),
        ],
    )


@pytest.mark.parametrize(
    ("found", "summary", "has_failed"),
    [
        (run(n1="pass"), "nothing failed", False),
        (run(link("fail"), n1="pass", n3="pass"), "bad link n1--n3", True),
        (run(link("warn"), n1="fail", n2="fail"), "bad nodes n1, n2", True),
        (run(n1="inconclusive", n2="error"), "nothing failed; not clear: n1, n2", False),
        (diagnostics_pb2.DiagnosticRun(state="interrupted"), "no result", False),
        (diagnostics_pb2.DiagnosticRun(state="running"), "not over yet", False),
    ],
)
def test_a_run_is_summed_up_in_a_clause(
    found: diagnostics_pb2.DiagnosticRun, summary: str, has_failed: bool
) -> None:
    assert findings.summary(found) == summary
    assert findings.has_failed(found) is has_failed


def test_a_report_shows_what_matters_and_why_things_were_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings.print_report(run(link("fail"), n1="pass", n3="pass"), every=False)
    shown = capsys.readouterr().out
    for part in (
        "bad link n1--n3",
        "note: 3 of 10 links were tested",
        "0.05, peers",
        "tried 3 times",
        "skipped: gpu (no NVIDIA driver)",
    ):
        assert part in shown
    assert "fine" not in shown
    findings.print_report(run(n1="pass"), every=True)
    assert "fine" in capsys.readouterr().out


def test_an_incident_says_what_its_checks_found() -> None:
    incident = incidents_pb2.Incident(
        incident_id="job.i2",
        node_checks=[
            incidents_pb2.NodeCheck(node="n1", verdict="pass"),
            incidents_pb2.NodeCheck(node="n2", verdict="fail"),
        ],
        bad_links=[incidents_pb2.BadLink(node="n1", peer="n3")],
        diagnostic_run="job.i2.d1",
    )
    lines = describe_incident.incident_lines(incident, 0.0)
    said = [text for label, text in lines if label == "checks"]
    assert said == [
        "bad link n1--n3, n2: fail, 1 of 2 pass",
        "outlast diagnose --show job.i2.d1",
    ]
