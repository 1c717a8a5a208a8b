"""What the journal writes of a batch folds into what was decided, wherever batches end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from controller.core.batches import compacted
from controller.core.codec import decode_fact, encode_fact
from controller.core.facts import Fact, IncidentGrown, State, fold
from controller.core.written import CommandsClosed, CommandsOpened, RecordChanged
from controller.sim.faults import SAFETY_S, plan_faults
from controller.sim.journal import Journal
from controller.sim.shapes import draw_shape
from controller.sim.timeline import EPOCH_S
from controller.sim.world import World

_BATCHES = (1, 2, 3, 8, 40, 256)


def _facts_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Fact]:
    """All that a controller decided in a virtual day of faults."""
    decided: list[Fact] = []
    append = Journal.append

    def noted(journal: Journal, facts: Sequence[Fact]) -> Iterator[tuple[Fact, Fact]]:
        decided.extend(facts)
        return append(journal, facts)

    monkeypatch.setattr(Journal, "append", noted)
    world = World(seed, draw_shape(Random(f"shape {seed}")), trace=False)
    plan_faults(world, None)
    world.timeline.run_until(EPOCH_S + SAFETY_S)
    return decided


def _tables(state: State) -> list[list[tuple[object, object]]]:
    """Contents in their order, which a replay relies on."""
    tables = (state.jobs, state.nodes, state.incidents, state.attempts, state.commands)
    return [
        *(list(table.items()) for table in tables),
        [(job, list(ranks)) for job, ranks in state.done.items()],
    ]


@pytest.mark.parametrize("seed", range(1, 4))
def test_batches_fold_into_what_was_decided(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, random = _facts_of(seed, monkeypatch), Random(seed)
    whole, written = State(), State()
    kinds: set[type[Fact]] = set()
    num_written = place = 0
    while place < len(facts):
        batch = facts[place : place + random.choice(_BATCHES)]
        place += len(batch)
        for fact in batch:
            whole.apply(fact)
        for fact in compacted(batch):
            num_written += 1
            kinds.add(type(fact))
            written.apply(decode_fact(json.loads(json.dumps(encode_fact(fact)))))
        if random.random() < 0.02:
            assert _tables(written) == _tables(whole)
    assert _tables(written) == _tables(whole)
    assert num_written < len(facts)
    assert {CommandsClosed, CommandsOpened, IncidentGrown, RecordChanged} <= kinds
    assert _tables(fold(compacted(facts))) == _tables(whole)
