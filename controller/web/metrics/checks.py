"""Diagnostics: verdicts, and how long checks take."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from controller.core.states import AWAY
from controller.families import Counter, Family, Gauge, Histogram
from controller.web.metrics.sources import Sources

RUNS = Counter("outlast_diagnostic_runs_total", "Suites that nodes have run", ("suite", "verdict"))
FINDINGS = Counter(
    "outlast_diagnostic_findings_total",
    "Findings on a node, for jobs and by hand; those on links are not among them",
    ("node", "test", "verdict"),
)
BAD_LINKS = Counter(
    "outlast_diagnostic_bad_links_total",
    "Times that a search has named the link between two nodes",
    ("node", "peer"),
)
DURATION = Histogram(
    "outlast_diagnostic_duration_seconds",
    "Time that a test took; that of a link with its repeats",
    ("test",),
)
MATMUL = Gauge(
    "outlast_node_matmul_flops_per_second",
    "Float32 matmul speed of one worker of the node, as its last check measured it",
    ("node",),
)
FAMILIES: tuple[Family, ...] = (RUNS, FINDINGS, BAD_LINKS, DURATION, MATMUL)


def collect(sources: Sources) -> Iterator[Metric]:
    """The families of this subject."""
    counters = sources.counters
    nodes = sources.service.state.nodes
    present = {name for name, node in nodes.items() if node.state not in AWAY}
    yield RUNS.of(counters.suites.items())
    yield FINDINGS.of(
        (labels, count) for labels, count in counters.findings.items() if labels[0] in present
    )
    yield BAD_LINKS.of(
        (ends, count) for ends, count in counters.bad_links.items() if present.issuperset(ends)
    )
    yield DURATION.of(((test,), distribution) for test, distribution in counters.checks.items())
    yield MATMUL.of(
        ((node,), flops) for node, flops in counters.matmul_flops.items() if node in present
    )
