"""Fills tensors from units: what this rank reads it passes on, the rest it is given.

All ranks go through their units in one order (`core/reading.py`). Receives are
posted ahead and sends are waited for late, both within a bound, so that reading,
sending and copying go on side by side. Every few rounds all ranks come to a
verdict (`peers.py`); until then a rank whose reads have failed sends bytes of no
meaning, so that nobody waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from checkpoint.core.reading import Message, Unit
from checkpoint.core.strips import Strip
from checkpoint.peers import Peers, Pending, agree, outcome
from checkpoint.readahead import ReadAhead

# Between two verdicts every rank reads at most this many units: 128 MiB.
_ROUNDS_PER_VERDICT = 8
# Bound of what has been posted to receive, and of what is being sent.
_UNDER_WAY_BYTES = 64 << 20


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
        self, peers: Peers, units: Sequence[Unit], source: ReadAhead, targets: Sequence[Target]
    ) -> None:
        self._peers = peers
        self._units = units
        self._source = source
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
        incoming = _Incoming(self._peers, units)
        outgoing = _Outgoing(self._peers)
        for unit in units:
            incoming.post()
            if unit.reader == self._peers.rank:
                content = self._read(unit)
                outgoing.send(unit, content)
                self._place(content, unit.pieces(self._peers.rank))
            else:
                self._place(*incoming.take())
        outgoing.wait()

    def _read(self, unit: Unit) -> Tensor:
        if self._problem is None:
            content = outcome(self._source.take)
            if isinstance(content, Tensor):
                return content
            self._problem = content
        return torch.empty(unit.end - unit.start, dtype=torch.uint8)

    def _place(self, content: Tensor, pieces: Sequence[tuple[int, Strip]]) -> None:
        for index, strip in pieces:
            _copy(content, self._targets[index].bytes, strip)


class _Incoming:
    """Receives of the units that others read, posted in order before they are needed."""

    def __init__(self, peers: Peers, units: Sequence[Unit]) -> None:
        self._peers = peers
        self._left = deque(unit for unit in units if unit.reader != peers.rank)
        self._posted: deque[tuple[Tensor, Message, Pending]] = deque()
        self._num_bytes = 0

    def post(self) -> None:
        """Post as many as fit, but one at least."""
        while self._left:
            unit = self._left[0]
            message = unit.message(self._peers.rank)
            if self._posted and self._num_bytes + message.nbytes > _UNDER_WAY_BYTES:
                return
            self._left.popleft()
            content = torch.empty(message.nbytes, dtype=torch.uint8)
            pending = self._peers.receive(content, unit.reader, unit.number)
            self._num_bytes += message.nbytes
            self._posted.append((content, message, pending))

    def take(self) -> tuple[Tensor, tuple[tuple[int, Strip], ...]]:
        """The next message once it is there, and what to do with it."""
        content, message, pending = self._posted.popleft()
        pending.wait()
        self._num_bytes -= message.nbytes
        return content, message.pieces


class _Outgoing:
    """Messages of what this rank has read."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._under_way: deque[tuple[Tensor, Pending]] = deque()
        self._num_bytes = 0

    def send(self, unit: Unit, content: Tensor) -> None:
        """Send every other rank of the unit's circle what it needs of it."""
        packed: dict[tuple[Strip, ...], Tensor] = {}
        for peer in unit.others:
            message = unit.message(peer)
            # Replicas need the same: it is packed once.
            body = packed.get(message.packing) if message.packing else None
            if body is None:
                body = packed[message.packing] = _cut_out(content, message)
            self._num_bytes += body.numel()
            self._under_way.append((body, self._peers.send(body, peer, unit.number)))
        self.wait(_UNDER_WAY_BYTES)

    def wait(self, max_bytes: int = 0) -> None:
        """Wait until no more than so much is under way."""
        while self._under_way and self._num_bytes > max_bytes:
            body, pending = self._under_way.popleft()
            pending.wait()
            self._num_bytes -= body.numel()


def _cut_out(content: Tensor, message: Message) -> Tensor:
    """The bytes of a message, out of its unit's."""
    if not message.packing:
        return content[message.start : message.start + message.nbytes]
    body = torch.empty(message.nbytes, dtype=torch.uint8)
    for strip in message.packing:
        _copy(content, body, strip)
    return body


def _copy(source: Tensor, target: Tensor, strip: Strip) -> None:
    """Copy a strip from one row of bytes to another, on whatever devices they are."""
    if strip.count == 1:
        taken = source[strip.source : strip.source + strip.run]
        target[strip.target : strip.target + strip.run].copy_(taken)
        return
    shape = (strip.count, strip.run)
    rows = source[strip.source :].as_strided(shape, (strip.source_stride, 1))
    target[strip.target :].as_strided(shape, (strip.target_stride, 1)).copy_(rows)
