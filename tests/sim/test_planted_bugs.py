"""Each planted mistake is caught by some of the first few seeds.

An invariant that cannot fail is worth nothing, so each entry of the table breaks controller,
edge or agent in one place and says within how many seeds which invariant must fall.
"""

from __future__ import annotations

import pytest

from controller.sim.run import run_seed
from controller.sim.violation import Violation
from tests.sim.planted import BUGS, Bug

LEAST_BUGS = 30


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, value in bug.plants:
        monkeypatch.setattr(owner, name, value)
    for seed in range(bug.seeds):
        try:
            run_seed(seed)
        except Violation as violation:
            message = str(violation)
            expected = tuple(f"invariant {number} " for number in bug.by)
            assert not bug.by or message.startswith(expected), message
            assert bug.says in message
            return
    pytest.fail(f"no seed of {bug.seeds} noticed: {bug.what}")


def test_there_are_as_many_bugs_as_promised() -> None:
    assert len({bug.what for bug in BUGS}) == len(BUGS) >= LEAST_BUGS
