"""Mistakes with copies of host memory on other nodes; see `planted`."""

from __future__ import annotations

from typing import Any

from checkpoint.core import placement, slots
from controller.core import starts
from controller.sim import attempt
from tests.sim import stories
from tests.sim.planted import around, bug, told


def _of_the_next_node(peers: Any, state: Any, attempt: Any, node_index: int) -> Any:
    return peers(state, attempt, (node_index + 1) % len(attempt.nodes))


def _as_if_replicated(place: Any, layout: Any, nodes: Any, **_: Any) -> Any:
    return place(layout, nodes, dp_is_sharded=False)


def _without_copied_step(choose_slot: Any, kept: Any, **facts: Any) -> Any:
    return choose_slot(kept, **{**facts, "replicated_step": -1})


def _newest_first(_choose_held: Any, held: Any, **_: Any) -> int:
    return int(max(held, key=lambda slot: (slot.sealed, slot.attempt, slot.step)).index)


REPLICA_BUGS = (
    bug("nobody is told where copies are", (7,), (starts, "_replica_peers", lambda *_: ())),
    bug(
        "a node is told where the copies of another one are",
        (7,),
        around(starts, "_replica_peers", _of_the_next_node),
    ),
    bug("a node keeps its own copies", (7,), (placement, "choose_shift", lambda *_: 0)),
    bug(
        "what differs from rank to rank is not copied",
        (7,),
        around(attempt, "place_replicas", _as_if_replicated),
    ),
    told(
        stories.node_is_lost,
        "the slot of the step that was copied is used again",
        (7,),
        around(slots, "choose_slot", _without_copied_step),
    ),
    told(
        stories.node_is_lost,
        "the newest copy gives way to the next",
        (7,),
        around(slots, "choose_held", _newest_first),
    ),
)
