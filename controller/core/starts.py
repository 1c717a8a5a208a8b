"""What each node receives with its order to start, worked out when the order is sent.

The journal has one record of an attempt for all its nodes. What differs between them follows
from it: a node's ranks from its index in the attempt, the agents that keep copies of their state
from the plan and from where those agents are reached now.
"""

from __future__ import annotations

from controller.core.attempt_record import AttemptRecord, NodeStart
from controller.core.changes import State
from controller.core.copies import partner_indexes
from controller.core.replica_peers import ReplicaPeer
from outlast.ids import NodeId


def start_on(state: State, attempt: AttemptRecord, node: NodeId) -> NodeStart:
    """The part of a job's newest attempt that is this node's."""
    node_index = state.index.node_index(attempt, node)
    return NodeStart(
        attempt=attempt,
        ranks=attempt.ranks_at(node_index),
        replica_peers=_replica_peers(state, attempt, node_index),
    )


def _replica_peers(
    state: State, attempt: AttemptRecord, node_index: int
) -> tuple[ReplicaPeer, ...]:
    others = partner_indexes(state.jobs[attempt.job].plan, attempt.replica_shift, node_index)
    peers = (state.nodes.get(attempt.nodes[other]) for other in others)
    return tuple(
        ReplicaPeer(
            node=peer.node,
            address=peer.address,
            port=peer.replica_port,
            token=peer.replica_token,
        )
        for peer in peers
        if peer is not None and peer.replica_port
    )
