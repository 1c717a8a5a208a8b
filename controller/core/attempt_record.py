"""What the journal keeps of an attempt besides the job's own record."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.replica_peers import ReplicaPeer
from outlast.chosen import ChosenStart
from outlast.ids import Attempt, JobId, NodeId
from outlast.skipped import StepRange


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """What the start orders of an attempt have in common.

    Journalled once for all of them: with every rank's node in the order of each node, the
    journal would grow with the square of the nodes.
    """

    job: JobId
    attempt: Attempt
    # In the order of their ranks, of which each has as many.
    nodes: tuple[NodeId, ...]
    workers_per_node: int
    rendezvous_host: str
    rendezvous_port: int
    committed_step: int
    spec_json: str
    checkpoint_url: str
    # Tells the job's checkpoints from those of another of the same id.
    owner: str
    # Ranges of steps whose batches are left out.
    skipped: tuple[StepRange, ...] = ()
    # The step whose loss was not finite and that this attempt repeats, and the nodes that
    # computed it.
    replayed_step: int | None = None
    suspects: tuple[NodeId, ...] = ()
    chosen: tuple[ChosenStart, ...] = ()
    # By how many places the copies of a node's ranks are away from it; 0: as the layout has it.
    replica_shift: int = 0
    # Nodes that began it without what they are to keep for others: these, or all.
    new_nodes: tuple[NodeId, ...] = ()
    all_new: bool = False

    @property
    def world_size(self) -> int:
        return len(self.nodes) * self.workers_per_node

    @property
    def rank_nodes(self) -> tuple[NodeId, ...]:
        """The node of each rank."""
        return tuple(node for node in self.nodes for _ in range(self.workers_per_node))

    def ranks_at(self, node_index: int) -> tuple[int, ...]:
        """The ranks of the node at this index."""
        return tuple(
            range(node_index * self.workers_per_node, (node_index + 1) * self.workers_per_node)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """What one node receives with its order to start. Not journalled: it follows from the state."""

    attempt: AttemptRecord
    ranks: tuple[int, ...]
    # The agents that keep the state of these ranks besides its own.
    replica_peers: tuple[ReplicaPeer, ...] = ()
