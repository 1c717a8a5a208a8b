"""The incidents of a simulated run, by what they were about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controller.core import cost
from controller.core.incident_record import IncidentRecord
from controller.core.states import JobState
from outlast.ids import IncidentId


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentClass:
    """Incidents of one cause, together."""

    cause: str
    count: int
    mean_recovery_s: float
    lost_s: float


def opened_by(incidents: Mapping[IncidentId, IncidentRecord], end_s: float) -> list[IncidentRecord]:
    """Those that were opened by then."""
    return [item for item in incidents.values() if item.opened_s <= end_s]


def by_cause(incidents: list[IncidentRecord]) -> tuple[IncidentClass, ...]:
    """Incidents by cause, the costliest first."""
    members_of: dict[str, list[IncidentRecord]] = {}
    for incident in incidents:
        members_of.setdefault(str(incident.cause), []).append(incident)
    found = []
    for cause, members in members_of.items():
        times = [t for item in members if (t := cost.recovery_s(item)) is not None]
        found.append(
            IncidentClass(
                cause=cause,
                count=len(members),
                mean_recovery_s=sum(times) / len(times) if times else 0.0,
                lost_s=sum(cost.lost_s(item) for item in members),
            )
        )
    return tuple(sorted(found, key=lambda each: -each.lost_s))


def waited_for_node(incident: IncidentRecord) -> bool:
    """Whether no standby was there for a node that had to go."""
    return cost.states_s(incident).get(JobState.PROVISIONING, 0.0) > 1.0
