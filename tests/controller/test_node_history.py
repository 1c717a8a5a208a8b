"""What is known of how a node came to be in its state."""

from __future__ import annotations

from dataclasses import replace

from controller.core.changes import NodeForgotten, NodePut
from controller.core.records import NodeRecord
from controller.core.states import NodeState
from controller.node_history import MAX_CHANGES, NodeHistory
from outlast.ids import NodeId

NODE = NodeRecord(
    node=NodeId("n0"),
    state=NodeState.READY,
    since_s=1.0,
    reason="joined",
    incarnation="a",
    address="",
    rendezvous_port=0,
    workers=1,
)


def test_changes_of_state_and_cordons_are_kept_in_order() -> None:
    history = NodeHistory()
    assigned = replace(NODE, state=NodeState.ASSIGNED, since_s=2.0, reason="to a job")
    cordoned = replace(assigned, cordoned=True)
    history.note([NodePut(node=assigned, before=NODE)], 2.0)
    history.note([NodePut(node=replace(assigned, num_suites=1), before=assigned)], 3.0)
    history.note([NodePut(node=cordoned, before=assigned)], 4.0)
    found = [(each.at_s, each.state, each.cordoned) for each in history.of(cordoned)]
    assert found == [
        (1.0, NodeState.READY, False),
        (2.0, NodeState.ASSIGNED, False),
        (4.0, NodeState.ASSIGNED, True),
    ]


def test_of_a_node_that_has_not_changed_its_present_state_is_known() -> None:
    (only,) = NodeHistory().of(NODE)
    assert (only.at_s, only.state, only.reason) == (1.0, NodeState.READY, "joined")


def test_a_node_that_joins_is_known_from_then_on() -> None:
    history = NodeHistory()
    history.note([NodePut(node=NODE)], 1.0)
    assert [each.state for each in history.of(NODE)] == [NodeState.READY]


def test_the_oldest_changes_and_forgotten_nodes_are_dropped() -> None:
    history = NodeHistory()
    states = (NodeState.READY, NodeState.ASSIGNED)
    for turn in range(2 * MAX_CHANGES):
        node = replace(NODE, state=states[turn % 2], since_s=float(turn))
        history.note([NodePut(node=node)], float(turn))
    kept = history.of(NODE)
    assert (len(kept), kept[-1].at_s) == (MAX_CHANGES, 2.0 * MAX_CHANGES - 1)
    history.note([NodeForgotten(node=NODE.node)], 99.0)
    assert len(history.of(NODE)) == 1
