"""Incidents: how many, by cause, and what they cost, part by part.

Closed incidents only, for everything that counts: until then cause and action
may still change, and a counter must not fall. All of it comes from the journal,
so it is the same after a restart of the controller.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric

from controller.core import cost
from controller.core.incident_record import IncidentRecord
from controller.core.states import IncidentState
from controller.families import Counter, Distribution, Family, Gauge, Histogram
from controller.web.metrics.sources import Sources

# A worker is restarted in a fraction of a second; a node may take an hour to replace.
_BOUNDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
_BY_CAUSE = ("job_id", "cause")

CLOSED = Counter(
    "outlast_incidents_total", "Incidents that are over", ("job_id", "cause", "action")
)
OPEN = Gauge("outlast_incidents_open", "Open incidents", ("job_id",))
DETECTION = Histogram(
    "outlast_incident_detection_seconds", "From the fault until it was noticed", _BY_CAUSE
)
DIAGNOSIS = Histogram(
    "outlast_incident_diagnosis_seconds", "From there until it was decided what to do", _BY_CAUSE
)
RECOVERY = Histogram(
    "outlast_incident_recovery_seconds", "From the fault until every rank trains again", _BY_CAUSE
)
PHASES = Counter(
    "outlast_incident_phase_seconds_total",
    "Time that jobs spent in each state between a fault's detection and the end of its incident",
    ("job_id", "cause", "phase"),
)
LOST = Counter(
    "outlast_lost_seconds_total",
    "Time in which a job stood still or repeated steps, until it was past the fault again",
    _BY_CAUSE,
)
FAMILIES: tuple[Family, ...] = (CLOSED, OPEN, DETECTION, DIAGNOSIS, RECOVERY, PHASES, LOST)


def collect(sources: Sources) -> Iterator[Metric]:
    """The families of this subject."""
    shown = [job.job_id for job in sources.shown_jobs()]
    incidents = [i for i in sources.service.state.incidents.values() if i.job in shown]
    closed = [i for i in incidents if i.state is IncidentState.CLOSED]
    open_ = Counts(i.job for i in incidents if i.state is not IncidentState.CLOSED)
    yield CLOSED.of(Counts((i.job, str(i.cause), str(i.action or "none")) for i in closed).items())
    yield OPEN.of(((job_id,), open_[job_id]) for job_id in shown)
    yield _histogram(DETECTION, closed, cost.detection_s)
    yield _histogram(DIAGNOSIS, closed, cost.diagnosis_s)
    yield _histogram(RECOVERY, closed, cost.recovery_s)
    phases: dict[tuple[str, str, str], float] = defaultdict(float)
    lost: dict[tuple[str, str], float] = defaultdict(float)
    for incident in closed:
        lost[incident.job, str(incident.cause)] += cost.lost_s(incident)
        for state, seconds in cost.states_s(incident).items():
            phases[incident.job, str(incident.cause), state.lower()] += seconds
    yield PHASES.of(phases.items())
    yield LOST.of(lost.items())


def _histogram(
    family: Histogram,
    incidents: list[IncidentRecord],
    measure: Callable[[IncidentRecord], float | None],
) -> Metric:
    distributions: dict[tuple[str, str], Distribution] = {}
    for incident in incidents:
        seconds = measure(incident)
        if seconds is not None:
            key = (incident.job, str(incident.cause))
            distributions.setdefault(key, Distribution(_BOUNDS_S)).add(seconds)
    return family.of(distributions.items())
