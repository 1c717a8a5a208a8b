"""Who else keeps the state of a node's ranks: what an agent must know of another one for that.

What does not belong here: which nodes those are (`checkpoint.core.placement`).
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPeer:
    """A node that has the state of another one's ranks, too."""

    node: NodeId
    address: str
    port: int
    token: str
