"""The last changes of each node's state, for people who ask how it came to be in the present one.

They are of this controller's life: the journal keeps what nodes are, not what they were. What put a
node out of use before is in its incidents and runs of diagnostics, which are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controller.core.changes import NodeForgotten, NodePut, StateChange
from controller.core.records import NodeRecord
from controller.core.states import NodeState
from outlast.ids import NodeId

# A node that changes more often has a fault that its newest changes show.
MAX_CHANGES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """A node got into this state, or was cordoned or uncordoned in it."""

    state: NodeState
    cordoned: bool
    reason: str
    at_s: float


class NodeHistory:
    """The changes of all nodes."""

    def __init__(self) -> None:
        self._changes: dict[NodeId, deque[NodeChange]] = {}

    def note(self, changes: Iterable[StateChange], now_s: float) -> None:
        """Keep what is new in these changes, which were just journalled."""
        for change in changes:
            if isinstance(change, NodePut):
                self._note(change, now_s)
            elif isinstance(change, NodeForgotten):
                self._changes.pop(change.node, None)

    def of(self, node: NodeRecord) -> Sequence[NodeChange]:
        """Those of one node, oldest first; at least how it got into its present state."""
        return tuple(self._changes.get(node.node, ())) or (_entered(node),)

    def _note(self, change: NodePut, now_s: float) -> None:
        node, kept = change.node, self._changes.get(change.node.node)
        if kept is None:
            kept = self._changes[node.node] = deque(maxlen=MAX_CHANGES)
            kept.append(_entered(node if change.before is None else change.before))
        last = kept[-1]
        if node.state is not last.state:
            kept.append(_entered(node))
        elif node.cordoned != last.cordoned:
            kept.append(
                NodeChange(state=node.state, cordoned=node.cordoned, reason=node.reason, at_s=now_s)
            )


def _entered(node: NodeRecord) -> NodeChange:
    return NodeChange(
        state=node.state, cordoned=node.cordoned, reason=node.reason, at_s=node.since_s
    )
