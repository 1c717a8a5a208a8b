"""Answers to liveness and readiness probes of a controller.

A controller that waits for another one is alive, and must not be restarted; but it is not ready:
requests go to the one that leads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """How far a controller is; the words are those of its answers."""

    WAITS = "waits"
    STARTS = "starts"
    LEADS = "leads"
    STOPS = "stops"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A controller as it is now."""

    phase: Phase
    why: str = ""
    """While it does not lead: for whom it waits, or what it does."""
    term: int | None = None
    """The term in which it writes; None before it has one."""
    read_only: str = ""
    """Why it decides nothing now; "" when it does."""
    failure: str = ""
    """Why it does not do its work; "" when it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a probe is answered."""

    is_ok: bool
    document: Mapping[str, object]


def liveness(health: Health) -> Answer:
    """Whether the process does its work, as it stands; a new one would do no better if so."""
    if health.failure:
        return _refused(health.failure)
    if health.term is None:
        return Answer(is_ok=True, document={"ok": True, health.phase.value: health.why})
    if health.read_only:
        # A new process would not find more room, and agents would lose the one that they have.
        return Answer(is_ok=True, document={"ok": True, "read_only": health.read_only})
    return Answer(is_ok=True, document={"ok": True, "term": health.term})


def readiness(health: Health) -> Answer:
    """Whether callers may be sent to it: to the one that leads, and to no other.

    One that is read-only answers what it can, and no other one leads.
    """
    if health.phase is not Phase.LEADS:
        return _refused(f"{health.phase}: {health.why}")
    return liveness(health)


def _refused(reason: str) -> Answer:
    return Answer(is_ok=False, document={"ok": False, "reason": reason})
