"""Each planted mistake is caught by some of the first few seeds.

An invariant that cannot fail is worth nothing, so each entry of the table breaks controller,
edge or agent in one place and says within how many seeds which invariant must fall.
"""

from __future__ import annotations

import pytest

from controller.sim.violation import Violation
from tests.sim.planted import BUGS as OTHER_BUGS
from tests.sim.planted import Bug
from tests.sim.planted_in_copies import REPLICA_BUGS
from tests.sim.planted_in_starts import START_BUGS
from tests.sim.stories import STORIES, Story

BUGS = (*OTHER_BUGS, *REPLICA_BUGS, *START_BUGS)
LEAST_BUGS = 30
# Where it takes many seeds, one that notices. It is tried first: the others, in their order, only
# if it does not notice any more.
NOTICED_BY = {
    "a deposed leader writes": 4,
    "a failed checkpoint counts": 9,
    "a limit that has passed changes nothing": 4,
    "a planned stop is a fault": 12,
    "a rank that lost its peer is blamed": 6,
    "a stall is never reported": 7,
    "an agent's wake-up is dropped": 4,
    "nobody wakes to give workers up": 22,
    "nodes are used twice": 9,
    "the edge's wake-up is dropped": 5,
}
# Of each story, so many seeds are known to be clean.
NUM_CLEAN = 2


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, value in bug.plants:
        monkeypatch.setattr(owner, name, value)
    first = NOTICED_BY.get(bug.what, 0)
    assert first < bug.seeds
    for seed in sorted(range(bug.seeds), key=lambda seed: seed != first):
        try:
            bug.story(seed)
        except Violation as violation:
            message = str(violation)
            expected = tuple(f"invariant {number} " for number in bug.by)
            assert not bug.by or message.startswith(expected), message
            assert bug.says in message
            return
    pytest.fail(f"no seed of {bug.seeds} noticed: {bug.what}")


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_story_ends_well_without_bugs(story: Story) -> None:
    for seed in range(NUM_CLEAN):
        story(seed)


def test_there_are_as_many_bugs_as_promised() -> None:
    names = {bug.what for bug in BUGS}
    assert len(names) == len(BUGS) >= LEAST_BUGS
    assert names >= NOTICED_BY.keys()
