"""What checks have found, in words: lines, tables and the one sentence that sums them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.cli import output

if TYPE_CHECKING:
    from outlast.v1.diagnostics_pb2 import DiagnosticRun, Finding

_NODE_HEADER = ("NODE", "VERDICT", "WHY")
_LINK_HEADER = ("LINK", "VERDICT", "VALUE", "LIMIT", "WHY")
_FINDING_HEADER = ("NODE", "TEST", "VERDICT", "VALUE", "LIMIT", "WHAT IT MEASURED")
_QUIET = ("pass", "skip")


def print_report(run: DiagnosticRun, *, every: bool) -> None:
    """A run for people: the sum, nodes, links, and the findings that matter (or all)."""
    print()
    print(f"run {run.run_id} ({run.suite}, {run.origin}): {run.state}; {summary(run)}")
    for note in run.notes:
        print(f"note: {note}")
    rows = [(report.node, report.verdict, report.reason) for report in run.node_reports]
    if rows:
        print()
        output.print_table(_NODE_HEADER, rows, empty="")
    links = [(_link(found), found.verdict, *_figures(found), found.detail) for found in run.links]
    if links:
        print()
        output.print_table(_LINK_HEADER, links, empty="")
    shown = [found for found in run.findings if every or found.verdict not in _QUIET]
    if shown:
        print()
        output.print_table(_FINDING_HEADER, [_row(found) for found in shown], empty="")
    skipped = [found for found in run.findings if found.verdict == "skip"]
    if skipped and not every:
        reasons = dict.fromkeys(f"{found.test} ({found.detail})" for found in skipped)
        print()
        print(f"skipped: {'; '.join(reasons)}")


def summary(run: DiagnosticRun) -> str:
    """One clause: who failed, or that nobody did."""
    if run.state == "running":
        return "not over yet"
    nodes = [report.node for report in run.node_reports if report.verdict == "fail"]
    links = [_link(found) for found in run.links if found.verdict == "fail"]
    parts = []
    if nodes:
        parts.append(f"bad node{'' if len(nodes) == 1 else 's'} {', '.join(nodes)}")
    if links:
        parts.append(f"bad link{'' if len(links) == 1 else 's'} {', '.join(links)}")
    if parts:
        return "; ".join(parts)
    unclear = [
        report.node for report in run.node_reports if report.verdict in ("inconclusive", "error")
    ]
    if unclear:
        return f"nothing failed; not clear: {', '.join(unclear)}"
    return "nothing failed" if run.state == "done" else "no result"


def has_failed(run: DiagnosticRun) -> bool:
    """Whether a node or a link is named."""
    return any(report.verdict == "fail" for report in run.node_reports) or any(
        found.verdict == "fail" for found in run.links
    )


def line(finding: Finding) -> str:
    """A finding on one line, for progress."""
    value, limit = _figures(finding)
    figure = f"{value} (limit {limit})" if finding.HasField("threshold") else value
    words = (finding.node, finding.test, finding.verdict, figure, finding.detail)
    return "  ".join(word for word in words if word)


def _row(finding: Finding) -> tuple[str, ...]:
    value, limit = _figures(finding)
    who = _link(finding) if finding.peer else finding.node
    return (who, finding.test, finding.verdict, value, limit, finding.detail)


def _link(finding: Finding) -> str:
    return f"{finding.node}--{finding.peer}"


def _figures(finding: Finding) -> tuple[str, str]:
    """The value with its name and unit, and the limit with its source."""
    value = limit = "-"
    if finding.metric:
        value = f"{finding.metric} {finding.value:.4g} {finding.unit}".rstrip()
    if finding.HasField("threshold"):
        limit = f"{finding.threshold:.4g}, {finding.threshold_source}"
    return value, limit
