"""What is deleted of an incident that has gone on for long: lines of its timeline, signs and
findings.

The beginning of lines and signs stays, which says what the fault was, and what came last.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.frozen import replace
from controller.core.incident_record import Evidence, IncidentRecord, TimelineEntry
from outlast.ids import IncidentId, NodeId

# Fault, detection, verdict and the first attempts to recover.
BEGINNING = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCut:
    """So many lines and signs after the beginning are older, or more, than is kept.

    Findings go with the nodes that they are about.
    """

    incident: IncidentId
    lines: int
    signs: int
    nodes: tuple[NodeId, ...] = ()
    """Whose findings go."""


def cut_lines(incident: IncidentRecord, cut: IncidentCut) -> tuple[TimelineEntry, ...]:
    """The lines that a cut deletes."""
    return incident.timeline[BEGINNING : BEGINNING + cut.lines]


def cut_signs(incident: IncidentRecord, cut: IncidentCut) -> tuple[Evidence, ...]:
    """The signs that a cut deletes."""
    return incident.evidence[BEGINNING : BEGINNING + cut.signs]


def cut_findings(incident: IncidentRecord, cut: IncidentCut) -> tuple[tuple[NodeId, str], ...]:
    """The findings that a cut deletes."""
    gone = frozenset(cut.nodes)
    return tuple(each for each in incident.findings if each[0] in gone)


def shortened(incident: IncidentRecord, cut: IncidentCut) -> IncidentRecord:
    """The incident without them."""
    lines, signs, gone = incident.timeline, incident.evidence, frozenset(cut.nodes)
    return replace(
        incident,
        timeline=lines[:BEGINNING] + lines[BEGINNING + cut.lines :],
        evidence=signs[:BEGINNING] + signs[BEGINNING + cut.signs :],
        findings=tuple(each for each in incident.findings if each[0] not in gone),
    )
