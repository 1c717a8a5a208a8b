"""Liveness and readiness of a controller in each phase."""

from __future__ import annotations

import pytest

from controller.core.health import Answer, Health, Phase, liveness, readiness

WAITS = Health(phase=Phase.WAITS, why="/state: another controller (pid 7) uses it")
STARTS = Health(phase=Phase.STARTS, why="it reads the journal")
LEADS = Health(phase=Phase.LEADS, term=3)
FULL = Health(phase=Phase.LEADS, term=3, read_only="/state: no room")
BROKEN = Health(phase=Phase.LEADS, term=3, failure="the journal cannot be written")
STOPS = Health(phase=Phase.STOPS, term=3, why="it was asked to")


def good(**document: object) -> Answer:
    return Answer(is_ok=True, document={"ok": True, **document})


def bad(reason: str) -> Answer:
    return Answer(is_ok=False, document={"ok": False, "reason": reason})


@pytest.mark.parametrize(
    ("health", "lives", "ready"),
    [
        (WAITS, good(waits=WAITS.why), bad(f"waits: {WAITS.why}")),
        (STARTS, good(starts=STARTS.why), bad(f"starts: {STARTS.why}")),
        (LEADS, good(term=3), good(term=3)),
        # It can be read, and no other controller could write more.
        (FULL, good(read_only="/state: no room"), good(read_only="/state: no room")),
        (BROKEN, bad(BROKEN.failure), bad(BROKEN.failure)),
        (STOPS, good(term=3), bad("stops: it was asked to")),
    ],
    ids=["waits", "starts", "leads", "full", "broken", "stops"],
)
def test_only_the_one_that_leads_is_ready(health: Health, lives: Answer, ready: Answer) -> None:
    assert (liveness(health), readiness(health)) == (lives, ready)
