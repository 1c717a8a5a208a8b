"""Fills tensors from units: what this rank reads it passes on, the rest it is given.

A rank of the same node gets the unit's place, copies what it needs, and says when it
has; others are sent what they need. `sharing.py` has the memory.

All ranks go through their units in one order (`core/reading.py`). Receives are
posted ahead and sends are waited for late, both within a bound, so that reading,
sending and copying go on side by side. Every few rounds all ranks come to a
verdict (`peers.py`); until then a rank whose reads have failed sends bytes of no
meaning, so that nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from checkpoint.core.reading import Message, Unit
from checkpoint.core.strided import StridedRange
from checkpoint.restore.peers import Peers, Pending, agree, outcome
from checkpoint.restore.readahead import ReadAhead
from checkpoint.restore.sharing import MOST_LENT, Buffer, Neighbours

# Between two verdicts every rank reads at most this many units: 128 MiB.
_ROUNDS_PER_VERDICT = 8
# Bound of what has been posted to receive.
_UNDER_WAY_BYTES = 64 << 20
# Says in which of its buffers a neighbour has a unit: one 64-bit number.
_NOTE_BYTES = 8


class Target:
    """A tensor as the bytes that strips count in."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        with torch.no_grad():
            self._dense = tensor.detach().contiguous()
        self.bytes = self._dense.view(-1).view(torch.uint8)

    def finish(self) -> None:
        """Bring the bytes home where the tensor itself does not lie in one piece."""
        if self._dense.data_ptr() != self._tensor.data_ptr():
            with torch.no_grad():
                self._tensor.copy_(self._dense)


class Passing:
    """One rank's part in filling the tensors of all ranks."""

    def __init__(
        self,
        peers: Peers,
        units: Sequence[Unit],
        source: ReadAhead,
        neighbours: Neighbours,
        targets: Sequence[Target],
    ) -> None:
        self._peers = peers
        self._units = units
        self._source = source
        self._neighbours = neighbours
        self._targets = targets
        self._problem: Exception | None = None

    def run(self, step: int) -> None:
        """Return once this rank's tensors are filled.

        Raises, on every rank alike: what a rank met when it read `step`.
        """
        num_rounds = self._peers.largest(max((unit.round + 1 for unit in self._units), default=0))
        for first in range(0, num_rounds, _ROUNDS_PER_VERDICT):
            last = first + _ROUNDS_PER_VERDICT
            self._pass([unit for unit in self._units if first <= unit.round < last])
            agree(self._peers, step, self._problem)

    def _pass(self, units: Sequence[Unit]) -> None:
        incoming = _Incoming(self._peers, self._neighbours, units)
        outgoing = _Outgoing(self._peers, self._neighbours, self._give_back)
        for unit in units:
            incoming.post()
            if unit.reader == self._peers.rank:
                buffer = self._read(unit)
                outgoing.send(unit, buffer)
                self._place(buffer.content, unit.pieces(self._peers.rank))
                outgoing.wait(MOST_LENT)
            else:
                self._place(*incoming.take())
                incoming.placed()
        outgoing.wait()
        incoming.wait()

    def _read(self, unit: Unit) -> Buffer:
        if self._problem is None:
            buffer = outcome(self._source.take)
            if isinstance(buffer, Buffer):
                return buffer
            self._problem = buffer
        # Bytes of no meaning, for those who wait.
        return Buffer(0, torch.empty(unit.end - unit.start, dtype=torch.uint8))

    def _give_back(self, buffer: Buffer) -> None:
        # After a failure nothing more is read, and a read that hangs may still write.
        if self._problem is None:
            self._source.give_back(buffer)

    def _place(self, content: Tensor, pieces: Sequence[tuple[int, StridedRange]]) -> None:
        for index, span in pieces:
            _copy(content, self._targets[index].bytes, span)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A unit that another rank reads: its bytes, or where a neighbour has them."""

    unit: Unit
    message: Tensor
    nbytes: int
    pieces: tuple[tuple[int, StridedRange], ...]
    pending: Pending
    is_near: bool


class _Incoming:
    """Receives of the units that others read, posted in order before they are needed."""

    def __init__(self, peers: Peers, neighbours: Neighbours, units: Sequence[Unit]) -> None:
        self._peers = peers
        self._neighbours = neighbours
        self._left = deque(unit for unit in units if unit.reader != peers.rank)
        self._posted: deque[_Arrival] = deque()
        self._taken: _Arrival | None = None
        self._thanks: list[Pending] = []
        self._num_bytes = 0

    def post(self) -> None:
        """Post as many as fit, but one at least."""
        while self._left:
            unit = self._left[0]
            is_near = self._neighbours.shares(unit.reader, self._peers.rank)
            message = None if is_near else unit.message(self._peers.rank)
            nbytes = _NOTE_BYTES if message is None else message.nbytes
            if self._posted and self._num_bytes + nbytes > _UNDER_WAY_BYTES:
                return
            self._left.popleft()
            content = torch.empty(nbytes, dtype=torch.uint8)
            self._num_bytes += nbytes
            self._posted.append(
                _Arrival(
                    unit,
                    content,
                    nbytes,
                    unit.pieces(self._peers.rank) if message is None else message.pieces,
                    self._peers.receive(content, unit.reader, unit.number),
                    is_near,
                )
            )

    def take(self) -> tuple[Tensor, tuple[tuple[int, StridedRange], ...]]:
        """The next unit's bytes once they are there, and what to do with them."""
        one = self._taken = self._posted.popleft()
        one.pending.wait()
        self._num_bytes -= one.nbytes
        if not one.is_near:
            return one.message, one.pieces
        index = int(one.message.view(torch.int64))
        unit = one.unit
        return self._neighbours.content(unit.reader, index, unit.end - unit.start), one.pieces

    def placed(self) -> None:
        """What was taken has been copied: whoever lent it may use its memory again."""
        one = self._taken
        if one is not None and one.is_near:
            unit = one.unit
            thanks = torch.zeros(1, dtype=torch.uint8)
            self._thanks.append(self._peers.send(thanks, unit.reader, unit.number))

    def wait(self) -> None:
        """Wait until whoever lent something knows that it is free."""
        for pending in self._thanks:
            pending.wait()
        self._thanks.clear()


class _Outgoing:
    """Units that this rank has read and others have not got all of yet."""

    def __init__(
        self, peers: Peers, neighbours: Neighbours, give_back: Callable[[Buffer], None]
    ) -> None:
        self._peers = peers
        self._neighbours = neighbours
        self._give_back = give_back
        # What is waited for of each, with the memory that messages are in.
        self._lent: deque[tuple[Buffer, list[tuple[Tensor, Pending]]]] = deque()

    def send(self, unit: Unit, buffer: Buffer) -> None:
        """Send every other rank of the unit's circle what it needs of it."""
        packed: dict[tuple[StridedRange, ...], Tensor] = {}
        under_way: list[tuple[Tensor, Pending]] = []
        for peer in unit.others:
            if self._neighbours.shares(self._peers.rank, peer):
                note = torch.tensor([buffer.index]).view(torch.uint8)
                under_way.append((note, self._peers.send(note, peer, unit.number)))
                thanks = torch.empty(1, dtype=torch.uint8)
                under_way.append((thanks, self._peers.receive(thanks, peer, unit.number)))
                continue
            message = unit.message(peer)
            # Replicas need the same: it is packed once.
            body = packed.get(message.packing) if message.packing else None
            if body is None:
                body = packed[message.packing] = _cut_out(buffer.content, message)
            under_way.append((body, self._peers.send(body, peer, unit.number)))
        self._lent.append((buffer, under_way))

    def wait(self, most_lent: int = 0) -> None:
        """Wait until no more than so many units are under way."""
        while len(self._lent) > most_lent:
            buffer, under_way = self._lent.popleft()
            for _, pending in under_way:
                pending.wait()
            self._give_back(buffer)


def _cut_out(content: Tensor, message: Message) -> Tensor:
    """The bytes of a message, out of its unit's."""
    if not message.packing:
        return content[message.start : message.start + message.nbytes]
    body = torch.empty(message.nbytes, dtype=torch.uint8)
    for span in message.packing:
        _copy(content, body, span)
    return body


def _copy(source: Tensor, target: Tensor, span: StridedRange) -> None:
    """Copy a strided range from one row of bytes to another, on whatever devices they are."""
    if span.count == 1:
        taken = source[span.source : span.source + span.run]
        target[span.target : span.target + span.run].copy_(taken)
        return
    shape = (span.count, span.run)
    rows = source[span.source :].as_strided(shape, (span.source_stride, 1))
    target[span.target :].as_strided(shape, (span.target_stride, 1)).copy_(rows)
