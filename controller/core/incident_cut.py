"""What is deleted of an incident that has gone on for long: lines of its timeline, signs and
findings.

The beginning of lines and signs stays, which says what the fault was, and what came last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from controller.core.records import Evidence, IncidentRecord, TimelineEntry
from outlast.ids import IncidentId

# Fault, detection, verdict and the first attempts to recover.
BEGINNING = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentCut:
    """So many lines and signs after the beginning, and so many findings from the first on, are
    older, or more, than is kept.
    """

    incident: IncidentId
    lines: int
    signs: int
    findings: int = 0


def cut_lines(incident: IncidentRecord, cut: IncidentCut) -> tuple[TimelineEntry, ...]:
    """The lines that a cut deletes."""
    return incident.timeline[BEGINNING : BEGINNING + cut.lines]


def cut_signs(incident: IncidentRecord, cut: IncidentCut) -> tuple[Evidence, ...]:
    """The signs that a cut deletes."""
    return incident.evidence[BEGINNING : BEGINNING + cut.signs]


def shortened(incident: IncidentRecord, cut: IncidentCut) -> IncidentRecord:
    """The incident without them."""
    lines, signs = incident.timeline, incident.evidence
    return replace(
        incident,
        timeline=lines[:BEGINNING] + lines[BEGINNING + cut.lines :],
        evidence=signs[:BEGINNING] + signs[BEGINNING + cut.signs :],
        findings=incident.findings[cut.findings :],
    )
