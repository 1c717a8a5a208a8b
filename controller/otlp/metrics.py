"""Metrics of the export by OTLP, of controllers and agents."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from controller.families import Counter, Family
from controller.otlp.queue import OUTCOMES, ExportQueue

RECORDS = Counter(
    "outlast_otlp_records_total",
    "Log records for OTLP by outcome: exported, dropped since too many waited, or failed",
    ("outcome",),
)
FAMILIES: tuple[Family, ...] = (RECORDS,)


def collect(queue: ExportQueue | None) -> Iterator[Metric]:
    """The families of this subject; zeros where nothing is exported."""
    counts = dict.fromkeys(OUTCOMES, 0) if queue is None else queue.counts()
    yield RECORDS.of(((outcome,), count) for outcome, count in counts.items())
