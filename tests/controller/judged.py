"""Hangs that an edge has found, judged at once."""

from __future__ import annotations

from controller.core.edge.edge import Edge
from controller.core.events import Event


def judged(edge: Edge) -> list[Event]:
    """What comes of them."""
    events: list[Event] = []
    for judgement in edge.take_judgements():
        events += edge.judged(judgement, judgement.judge())
    return events
