"""Each mistake of an agent's machine is caught by some of a few seeds."""

from __future__ import annotations

import pytest

from controller.sim.run import run_seed
from controller.sim.violation import Violation
from tests.sim.agent_bugs import AGENT_BUGS, Bug

MAX_SEEDS = 40


@pytest.mark.parametrize("bug", AGENT_BUGS, ids=lambda bug: bug.what)
def test_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug.owner, bug.name, bug.value)
    for seed in range(MAX_SEEDS):
        try:
            run_seed(seed)
        except Violation:
            return
    pytest.fail(f"no seed of {MAX_SEEDS} noticed: {bug.what}")
