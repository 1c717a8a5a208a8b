"""What an incident cost, from its own record: how long each part of it took.

A part that has not happened yet is None. Times come from several clocks (the
worker's, the agent's, ours), so that a part never counts as less than nothing.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from controller.core.accounting import PARTS, Part, part_of
from controller.core.incident_record import IncidentRecord
from controller.core.states import JobState


def detection_s(incident: IncidentRecord) -> float:
    """From the fault until the incident was opened."""
    return max(0.0, incident.opened_s - incident.fault_s)


def diagnosis_s(incident: IncidentRecord) -> float | None:
    """From there until it was decided what to do; checks after the fault included."""
    verdicts = [entry.at_s for entry in incident.timeline if entry.is_verdict]
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
    if incident.closed_s is None or not _stopped(incident):
        return 0.0
    return max(0.0, incident.closed_s - incident.fault_s)


def states_s(incident: IncidentRecord) -> dict[JobState, float]:
    """Seconds that the job spent in each state, from the first one after the fault on.

    The last one lasts until the incident is closed, or until the newest line of the timeline.
    What was noted meanwhile ends no state.
    """
    entered = [(entry.at_s, entry.state) for entry in incident.timeline if entry.state is not None]
    end_s = incident.closed_s
    if end_s is None:
        end_s = max((entry.at_s for entry in incident.timeline), default=0.0)
    until_s = [at_s for at_s, _ in entered[1:]] + [end_s]
    totals: dict[JobState, float] = defaultdict(float)
    for (since_s, state), ended_s in zip(entered, until_s, strict=False):
        totals[state] += max(0.0, ended_s - since_s)
    return dict(totals)


def parts_s(incident: IncidentRecord, now_s: float) -> dict[Part, float]:
    """Seconds from the fault until training was past it again (or until now), by part.

    They are those of the job's account that this fault is to blame for, and sum to the
    time between fault and end. One that never stopped the workers cost nothing.
    """
    totals = dict.fromkeys(PARTS, 0.0)
    if not _stopped(incident):
        return totals
    end_s = now_s if incident.closed_s is None else incident.closed_s
    marks = [(incident.fault_s, Part.DETECT), *_marks(incident), (end_s, Part.PRODUCTIVE)]
    for (since_s, part), (until_s, _) in pairwise(marks):
        begin_s = min(max(since_s, incident.fault_s), end_s)
        totals[part] += max(0.0, min(until_s, end_s) - begin_s)
    return totals


def steps_lost(incident: IncidentRecord) -> int | None:
    """Steps that were trained and had to be trained again; None before it is known."""
    if incident.resumed_step is None:
        return None
    return max(0, incident.fault_step - incident.resumed_step)


def _marks(incident: IncidentRecord) -> list[tuple[float, Part]]:
    """When a part of an incident began, in the order of time."""
    marks: list[tuple[float, Part]] = []
    for entry in incident.timeline:
        if entry.state is not None:
            part = part_of(entry.state, is_redoing=True, is_for_user=False)
            marks.append((max(entry.at_s, incident.fault_s), part or Part.PRODUCTIVE))
    return marks


def _stopped(incident: IncidentRecord) -> bool:
    return any(entry.state is JobState.SUSPENDING for entry in incident.timeline)
