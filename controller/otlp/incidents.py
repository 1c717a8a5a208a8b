"""Incidents as log records: one when an incident opens, and one at each change of its state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from controller.core.changes import State
from controller.core.incident_record import IncidentRecord
from controller.core.states import IncidentState
from controller.otlp.queue import ExportQueue
from controller.otlp.records import Record
from controller.service import Service
from outlast.ids import IncidentId

# The state changes many times a second.
PERIOD_S = 1.0

Known = Mapping[IncidentId, IncidentState]


async def export_incidents(service: Service, queue: ExportQueue) -> None:
    """Export what happens from now on, for as long as the controller lives."""
    known = states_of(service.state)
    seen = service.changes.version
    while True:
        seen = await service.changes.wait(seen)
        now = states_of(service.state)
        for incident in changed(service.state, known):
            queue.put(record_of(incident, service.now_s))
        known = now
        await asyncio.sleep(PERIOD_S)


def states_of(state: State) -> dict[IncidentId, IncidentState]:
    """Every incident that is kept, with its state."""
    return {incident.incident: incident.state for incident in state.incidents.values()}


def changed(state: State, known: Known) -> list[IncidentRecord]:
    """Incidents that are new or in another state than they were."""
    return [
        incident
        for incident in state.incidents.values()
        if known.get(incident.incident) is not incident.state
    ]


def record_of(incident: IncidentRecord, now_s: float) -> Record:
    """An incident as it stands."""
    is_over = incident.state is IncidentState.CLOSED
    attributes: dict[str, str | int] = {
        "outlast.incident": incident.incident,
        "outlast.incident.state": incident.state,
        "outlast.incident.cause": incident.cause,
        "outlast.incident.nodes": ",".join(incident.culprits),
        "outlast.job": incident.job,
        "outlast.attempt": incident.attempt,
        "outlast.step": incident.fault_step,
    }
    if incident.action is not None:
        attributes["outlast.incident.action"] = incident.action
    return Record(
        at_ns=round(now_s * 1e9),
        body=f"incident {incident.incident} is {incident.state}: {incident.cause}"
        + (f"; {incident.reason}" if incident.reason else ""),
        level=logging.INFO if is_over else logging.WARNING,
        scope="outlast.incidents",
        attributes=attributes,
    )
