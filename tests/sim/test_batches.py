"""What the journal writes of a batch folds into what was decided, wherever batches end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from controller.core.batches import compacted
from controller.core.changes import IncidentGrown, State, StateChange, fold
from controller.core.codec import decode_change, encode_change
from controller.core.written import CommandsClosed, CommandsOpened, RecordChanged
from controller.sim.faults import SAFETY_S, plan_faults
from controller.sim.journal import Journal
from controller.sim.shapes import draw_shape
from controller.sim.timeline import EPOCH_S
from controller.sim.world import World

_BATCHES = (1, 2, 3, 8, 40, 256)


def _changes_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[StateChange]:
    """All that a controller decided in a virtual day of faults."""
    decided: list[StateChange] = []
    append = Journal.append

    def noted(
        journal: Journal, changes: Sequence[StateChange]
    ) -> Iterator[tuple[StateChange, StateChange]]:
        decided.extend(changes)
        return append(journal, changes)

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
    changes, random = _changes_of(seed, monkeypatch), Random(seed)
    whole, written = State(), State()
    kinds: set[type[StateChange]] = set()
    num_written = place = 0
    while place < len(changes):
        batch = changes[place : place + random.choice(_BATCHES)]
        place += len(batch)
        for change in batch:
            whole.apply(change)
        for change in compacted(batch):
            num_written += 1
            kinds.add(type(change))
            written.apply(decode_change(json.loads(json.dumps(encode_change(change)))))
        if random.random() < 0.02:
            assert _tables(written) == _tables(whole)
    assert _tables(written) == _tables(whole)
    assert num_written < len(changes)
    assert {CommandsClosed, CommandsOpened, IncidentGrown, RecordChanged} <= kinds
    assert _tables(fold(compacted(changes))) == _tables(whole)
