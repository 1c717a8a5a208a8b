"""The sends and receives of pipelines, each send beside its receive. Pure.

A rank notes a send when it waits for its end, and when the message left; a receive when it waits
for the message. Together they say what neither does alone: whether the receiver waited for the
sender or for the link between them, and for how long a message was under way while both computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outlast.layout import Layout
from outlast.trace.ranks import TracedOperation, TracedRank, step_at

SEND, RECEIVE = "send", "recv"
# A step has one message of a key, and one more for each batch that it evaluates on.
MOST_OF_A_KEY = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message, by the clocks of both of its ends."""

    index: int
    """Which no other message has."""
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

    number: int
    # When each wait for the end of a send began, and when that had left.
    sends: list[tuple[int, int]] = field(default_factory=list)
    # When each receive began and ended.
    receives: list[tuple[int, int]] = field(default_factory=list)


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
    """Of all the ranks that were added."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._ends: dict[_Key, _Ends] = {}

    def add(self, rank: TracedRank) -> None:
        """One more rank."""
        for each in rank.operations:
            key = self._key(rank, each)
            if key is not None:
                ends = self._ends.setdefault(key, _Ends(len(self._ends)))
                if each.name == SEND:
                    ends.sends.append((each.start_ns, each.begun_ns))
                else:
                    ends.receives.append((each.start_ns, each.end_ns))

    def of(self, rank: TracedRank, operation: TracedOperation) -> Message | None:
        """The message of a send or receive; None where its other end is not known."""
        key = self._key(rank, operation)
        ends = None if key is None else self._ends.get(key)
        if key is None or ends is None:
            return None
        same = ends.sends if operation.name == SEND else ends.receives
        starts = [start_ns for start_ns, _ in same]
        # From the end: what is written over is the oldest.
        back = len(starts) - starts.index(operation.start_ns)
        if back > min(len(ends.sends), len(ends.receives)):
            return None
        (_, departed_ns), (awaited_ns, arrived_ns) = ends.sends[-back], ends.receives[-back]
        return Message(
            index=ends.number * MOST_OF_A_KEY + min(back, MOST_OF_A_KEY - 1),
            sender=key.sender,
            receiver=key.receiver,
            departed_ns=departed_ns,
            awaited_ns=awaited_ns,
            arrived_ns=arrived_ns,
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
