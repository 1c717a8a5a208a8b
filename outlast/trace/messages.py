"""The sends and receives of pipelines, each send beside its receive. Pure.

A rank notes a send when it waits for its end, and when the message left; a receive when it waits
for the message. Together they say what neither does alone: whether the receiver waited for the
sender or for the link between them, and for how long a message was under way while both computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from outlast.layout import Layout
from outlast.trace.ranks import TracedOperation, TracedRank, step_at

SEND, RECEIVE = "send", "recv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message, by the clocks of both of its ends."""

    sender: int
    receiver: int
    departed_ns: int
    """When it left, or the sender began to wait for its end, where no more is known."""
    awaited_ns: int
    """When the receiver began to wait for it."""
    arrived_ns: int
    """When the receiver had it; it may have been there before it was waited for."""


@dataclass(frozen=True, slots=True)
class _Key:
    step: int
    sender: int
    receiver: int
    number: int


@dataclass(slots=True)
class _Ends:
    """Of one key, in order: a step that evaluates, too, has it more than once."""

    sends: list[TracedOperation] = field(default_factory=list)
    receives: list[TracedOperation] = field(default_factory=list)


def peer_of(rank: TracedRank, operation: TracedOperation, layout: Layout) -> int | None:
    """The other rank of a send or receive; None where that is not known."""
    if operation.name not in (SEND, RECEIVE) or operation.peer is None or rank.at is None:
        return None
    if operation.group == "world":
        group: tuple[int, ...] = tuple(range(layout.world_size))
    else:
        try:
            group = layout.group_of(operation.group, rank.rank)
        except ValueError:
            return None
    return group[operation.peer] if 0 <= operation.peer < len(group) else None


class Messages:
    """Of all the ranks that are known."""

    def __init__(self, ranks: Iterable[TracedRank], layout: Layout) -> None:
        self._layout = layout
        self._ends: defaultdict[_Key, _Ends] = defaultdict(_Ends)
        for rank in ranks:
            for operation in rank.operations:
                key = self._key(rank, operation)
                if key is not None:
                    ends = self._ends[key]
                    same = ends.sends if operation.name == SEND else ends.receives
                    same.append(operation)

    def of(self, rank: TracedRank, operation: TracedOperation) -> Message | None:
        """The message of a send or receive; None where its other end is not known."""
        key = self._key(rank, operation)
        if key is None or key not in self._ends:
            return None
        ends = self._ends[key]
        same = ends.sends if operation.name == SEND else ends.receives
        # From the end: what is written over is the oldest.
        back = len(same) - next(
            (index for index, each in enumerate(same) if each.start_ns == operation.start_ns),
            len(same),
        )
        if not 0 < back <= min(len(ends.sends), len(ends.receives)):
            return None
        sent, received = ends.sends[-back], ends.receives[-back]
        return Message(
            sender=key.sender,
            receiver=key.receiver,
            departed_ns=sent.departed_ns or sent.start_ns,
            awaited_ns=received.start_ns,
            arrived_ns=received.end_ns,
        )

    def _key(self, rank: TracedRank, operation: TracedOperation) -> _Key | None:
        peer = peer_of(rank, operation, self._layout)
        if peer is None or operation.message is None:
            return None
        step = step_at(rank, operation.start_ns)
        if step is None:
            return None
        sends = operation.name == SEND
        sender, receiver = (rank.rank, peer) if sends else (peer, rank.rank)
        return _Key(step, sender, receiver, operation.message)
