"""Everything that the machine can ask of the world, in the order in which it must happen.

`Persist` comes first in a batch and must be durable before any other effect of
the batch runs. Every other effect can be repeated: commands carry ids that the
agent remembers, and provisioning says how many nodes are wanted, not one more.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.attempt_record import NodeStart
from controller.core.changes import StateChange
from controller.core.orders import CommandRecord
from outlast.ids import JobId, NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Append these state changes to the journal in one commit."""

    changes: tuple[StateChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommand:
    """Send a command to its node, if it is connected; it is sent again when it joins."""

    command: CommandRecord
    # What the node receives with an order to start; None with other commands.
    start: NodeStart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionNodes:
    """The fleet lacks `count` nodes with at least `workers` places each."""

    count: int
    workers: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictNode:
    """Take the node out of the cluster: nothing of ours may run there."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFaults:
    """Check these nodes and the links between them; `FaultsSearched` brings what was found.

    A search that is under way is not begun again.
    """

    search: str
    job: JobId
    nodes: tuple[NodeId, ...]
    # Partners for nodes that none of the others can clear.
    spares: tuple[NodeId, ...]
    suite: str
    checkpoint_url: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSearch:
    """Nobody waits for a search any more, and its nodes may be wanted: stop checking them.

    One that is not under way needs no end.
    """

    search: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Tell a person."""

    summary: str


Effect = Persist | SendCommand | ProvisionNodes | EvictNode | SearchFaults | EndSearch | Alert
