"""What an incident cost, from its own record: how long each part of it took.

A part that has not happened yet is None. Times come from several clocks (the
worker's, the agent's, ours), so that a part never counts as less than nothing.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from controller.core.records import IncidentRecord
from controller.core.states import JobState


def detection_s(incident: IncidentRecord) -> float:
    """From the fault until the incident was opened."""
    return max(0.0, incident.opened_s - incident.fault_s)


def diagnosis_s(incident: IncidentRecord) -> float | None:
    """From there until it was decided what to do; checks after the fault included."""
    verdicts = [entry.at_s for entry in incident.timeline if entry.phase == "verdict"]
    return max(0.0, verdicts[-1] - incident.opened_s) if verdicts else None


def recovery_s(incident: IncidentRecord) -> float | None:
    """From the fault until every rank had completed a step again."""
    if incident.recovered_s is None:
        return None
    return max(0.0, incident.recovered_s - incident.fault_s)


def lost_s(incident: IncidentRecord) -> float:
    """Seconds in which the job stood still or repeated steps, once the incident is closed.

    It is closed when training has passed the step of the fault again. One that
    never stopped the workers (a checkpoint that could not be stored) cost nothing.
    """
    stopped = any(entry.phase == JobState.SUSPENDING.lower() for entry in incident.timeline)
    if incident.closed_s is None or not stopped:
        return 0.0
    return max(0.0, incident.closed_s - incident.fault_s)


def phases_s(incident: IncidentRecord) -> dict[str, float]:
    """Seconds in each phase of the timeline; a phase lasts until the next one begins."""
    entries = sorted(incident.timeline, key=lambda entry: entry.at_s)
    totals: dict[str, float] = defaultdict(float)
    for entry, following in pairwise(entries):
        totals[entry.phase] += following.at_s - entry.at_s
    return dict(totals)
