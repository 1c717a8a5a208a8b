"""The controller itself: version, term, journal."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

import outlast
from controller.core.edge.rules import Reason
from controller.families import Counter, Distribution, Family, Gauge, Histogram, Info
from controller.guard import PARTS
from controller.sessions.incoming import CORRECTED, DROPPED
from controller.web.metrics.sources import Sources

COMMIT_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)

BUILD = Info("outlast_build_info", "Version of the controller", ("version",))
LEADS = Gauge(
    "outlast_controller_leads",
    "1 for the controller that leads, 0 for one that waits to take over (`--wait`), which has no "
    "other series but its version",
)
TERM = Gauge("outlast_controller_term", "Term in which it writes")
BLIND = Gauge(
    "outlast_controller_blind", "1 while many nodes are silent at once and nothing is replaced"
)
ALERTS = Counter("outlast_alerts_total", "Alerts that the controller itself has raised for people")
COMMIT = Histogram("outlast_journal_commit_seconds", "Time to make one batch of changes durable")
BAD_REPORTS = Counter(
    "outlast_controller_bad_reports_total",
    "Messages of agents, or parts of them, that were dropped or corrected, by reason",
    ("outcome", "reason"),
)
POISONED = Counter(
    "outlast_controller_poisoned_events_total",
    "Events that were skipped because the controller failed on them",
)
ASIDE = Gauge(
    "outlast_jobs_set_aside", "Jobs about which nothing is decided, as their states are the error"
)
ERRORS = Counter(
    "outlast_controller_internal_errors_total",
    "Errors in parts of the controller that only observe; the rest continued",
    ("part",),
)
CLOCK_STEPS = Counter(
    "outlast_controller_clock_steps_total",
    "Steps of the wall clock by more than 2 s; deadlines do not follow them",
)
CLOCK_OFFSET = Gauge(
    "outlast_controller_clock_offset_seconds",
    "How far the wall clock is ahead of the steady time in which things are decided and noted",
)
READ_ONLY = Gauge(
    "outlast_controller_read_only", "1 while its disk is full and nothing can be decided"
)
FREE = Gauge("outlast_journal_free_bytes", "Room on the disk of the state directory")
FAMILIES: tuple[Family, ...] = (
    BUILD,
    LEADS,
    TERM,
    BLIND,
    ALERTS,
    COMMIT,
    BAD_REPORTS,
    POISONED,
    ASIDE,
    ERRORS,
    CLOCK_STEPS,
    CLOCK_OFFSET,
    READ_ONLY,
    FREE,
)


def collect(sources: Sources, commits: Distribution) -> Iterator[Metric]:
    """The families of this subject."""
    yield BUILD.of([(outlast.__version__,)])
    yield LEADS.value(1)
    yield TERM.value(sources.service.term)
    yield BLIND.value(sources.service.is_blind)
    yield ALERTS.value(sources.effects.counts["Alert"])
    yield COMMIT.of([((), commits)])
    counts = sources.incoming.counts
    # All of them from the start: the first one is already a rise.
    yield POISONED.value(sources.service.poison.num_marked)
    yield ASIDE.value(sources.service.num_aside)
    yield CLOCK_STEPS.value(sources.clock.num_steps)
    yield CLOCK_OFFSET.value(sources.clock.offset_s)
    yield READ_ONLY.value(bool(sources.service.read_only))
    free_bytes = sources.service.free_bytes
    yield FREE.of([] if free_bytes is None else [((), free_bytes)])
    errors = sources.service.guard.counts
    yield ERRORS.of([((part,), errors[part]) for part in PARTS])
    known = [(outcome, reason) for outcome in (DROPPED, CORRECTED) for reason in Reason]
    yield BAD_REPORTS.of(
        [((outcome, reason), counts[outcome, reason]) for outcome, reason in known]
    )


def collect_standby() -> Iterator[Metric]:
    """What a controller shows that does not lead yet."""
    yield BUILD.of([(outlast.__version__,)])
    yield LEADS.value(0)
