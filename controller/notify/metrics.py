"""Metrics of notifications."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from controller.families import Counter, Family
from controller.notify.notifier import Notifier

SENT = Counter(
    "outlast_notifications_total",
    "Notifications by receiver and outcome: sent, or failed and to be tried again",
    ("receiver", "outcome"),
)
FAMILIES: tuple[Family, ...] = (SENT,)


def collect(notifier: Notifier) -> Iterator[Metric]:
    """The families of this subject."""
    yield SENT.of(list(notifier.counts().items()))
