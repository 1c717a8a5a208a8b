"""`Comm` over gloo, where every operation is built from tagged messages.

Gloo's own reduce-scatter moves the bytes of an all-reduce, and its rings cost
one process switch per peer; a direct exchange and a local sum in group order
do neither, and make every reduction bitwise reproducible. A few numbers of many members
are summed by the first of them, in the same order: messages cost more than a second way.
Receives are posted
before sends: a gloo send is a rendezvous, it ends only once its peer has
posted the receive. After that the data moves in gloo's own thread, under
whatever this one computes.

Each exchange has a tag of its own, counted alike on all members, so the
messages of several operations under way never take each other's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outlast.blackbox import Op
from trainer.parallel.comm import (
    BackendComm,
    Departure,
    Exchange,
    Pending,
    PendingReduce,
    Recorder,
    Waited,
    check_parts,
    is_same_memory,
    sum_in_order,
)

_FIRST_COLLECTIVE_TAG = 1 << 24
# Tags come round again after this many exchanges; far fewer are ever under way.
_NUM_COLLECTIVE_TAGS = 1 << 16
# Below this many bytes an all-reduce sends whole buffers to all peers at once
# (one exchange); above, it reduce-scatters and gathers (two, of fewer bytes).
_SMALL_BYTES = 64 * 1024
# From so many members on, buffers of at most `_SMALL_BYTES` go to the first member and back:
# 2 (n - 1) messages instead of n (n - 1).
_MANY_MEMBERS = 8


class GlooComm(BackendComm):
    """Collectives as direct exchanges, summed in group order."""

    def connect(self, backend: Any, recorder: Recorder) -> None:
        super().connect(backend, recorder)
        self._num_exchanges = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self.waiting(Op.ALL_REDUCE):
            _AllReduce(self, tensor, in_one=False).complete()
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        rows = tensor.new_empty((self.size, *tensor.shape))
        with self.waiting(Op.ALL_REDUCE):
            self.gather_rows(tensor.contiguous(), rows, Op.ALL_REDUCE).complete()
        return tensor.copy_(rows.amax(dim=0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        rows = tensor.new_empty((self.size, *tensor.shape))
        with self.waiting(Op.ALL_GATHER):
            self.gather_rows(tensor.contiguous(), rows, Op.ALL_GATHER).complete()
        return rows.flatten(0, 1)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        part = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        with self.waiting(Op.REDUCE_SCATTER):
            _ReduceScatter(self, tensor.contiguous(), part).complete()
        return part

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        tag = self.next_tag()
        with self.waiting(Op.BROADCAST, Waited(detail=root)):
            if self.index == root:
                works = [self.post_send(tensor, peer, tag) for peer in self.peers]
            else:
                works = [self.post_recv(tensor, root, tag)]
            for work in works:
                work.wait()
        return tensor

    def start_all_gather(self, shard: Tensor, out: Tensor) -> Pending:
        check_parts(shard, out, self.size)
        rows = out.view(self.size, *shard.shape)
        return self.gather_rows(shard.contiguous(), rows, Op.ALL_GATHER)

    def start_reduce_scatter(
        self, flat: Tensor, out: Tensor, *, wire_dtype: torch.dtype | None = None
    ) -> Pending:
        check_parts(out, flat, self.size)
        return _ReduceScatter(self, flat, out, wire_dtype)

    def start_all_reduce(self, tensor: Tensor) -> PendingReduce:
        # For two members both ways send the same bytes, and one exchange is done without
        # this thread's help half-way.
        return _AllReduce(self, tensor, in_one=self.size == 2)

    def start_exchange(self, incoming: Sequence[Tensor], op: Op) -> Exchange:
        return _Exchange(self, incoming, op)

    def next_tag(self) -> int:
        """A tag that no other exchange under way has."""
        self._num_exchanges += 1
        return _FIRST_COLLECTIVE_TAG + self._num_exchanges % _NUM_COLLECTIVE_TAGS

    def gather_rows(self, own: Tensor, rows: Tensor, op: Op) -> _Exchange:
        """Start to stack every member's contiguous tensor, in group order."""
        exchange = _Exchange(self, list(rows), op)
        exchange.send([own] * self.size)
        if not is_same_memory(own, rows[self.index]):
            rows[self.index].copy_(own)
        return exchange


class _Exchange:
    """One message to and from every peer, under one tag."""

    def __init__(self, comm: GlooComm, incoming: Sequence[Tensor], op: Op) -> None:
        self._comm = comm
        self._op = op
        self._tag = comm.next_tag()
        self._works = [comm.post_recv(incoming[peer], peer, self._tag) for peer in comm.peers]
        self.departure = Departure()

    def send(self, outgoing: Sequence[Tensor]) -> None:
        self.departure = self._comm.departed()
        # The works keep their tensors alive.
        self._works += [
            self._comm.post_send(outgoing[peer], peer, self._tag) for peer in self._comm.peers
        ]

    def wait(self) -> None:
        with self._comm.waiting(self._op, Waited(departure=self.departure)):
            self.complete()

    def complete(self) -> None:
        """Wait as a part of an operation that the black box already knows."""
        for work in self._works:
            work.wait()
        self._comm.landed()


class _ReduceScatter:
    """Every member's parts of one member, exchanged, then summed there in group order."""

    def __init__(
        self,
        comm: GlooComm,
        flat: Tensor,
        out: Tensor,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._comm = comm
        self._out = out
        own = flat.view(comm.size, *out.shape)
        wire = own if wire_dtype in (None, flat.dtype) else own.to(wire_dtype)
        received = torch.empty_like(wire)
        self._exchange = _Exchange(comm, list(received), Op.REDUCE_SCATTER)
        self._exchange.send(list(wire))
        self._parts = [*received[: comm.index], own[comm.index], *received[comm.index + 1 :]]

    @property
    def departure(self) -> Departure:
        return self._exchange.departure

    def wait(self) -> None:
        with self._comm.waiting(Op.REDUCE_SCATTER, Waited(departure=self.departure)):
            self._exchange.complete()
        sum_in_order(self._parts, self._out)

    def complete(self) -> None:
        """Wait as a part of an operation that the black box already knows."""
        self._exchange.complete()
        sum_in_order(self._parts, self._out)


class _AllReduce:
    """A reduce-scatter, then an all-gather; what is small or left over is not split."""

    def __init__(self, comm: GlooComm, tensor: Tensor, *, in_one: bool) -> None:
        self._comm = comm
        flat = tensor.view(-1)
        in_one = in_one or tensor.nbytes <= _SMALL_BYTES * comm.size
        num_scattered = 0 if in_one else flat.numel() // comm.size * comm.size
        self._scatter: _ReduceScatter | None = None
        self._gather: _Exchange | None = None
        self._whole: _ToAll | _ByTheFirst | None = None
        # Of the part of it that left first and is still under way.
        self._departure = Departure()
        self._rest = flat
        # No view that is not needed: a forked process pays for each kind of operation once.
        if num_scattered:
            self._scattered, self._rest = flat[:num_scattered], flat[num_scattered:]
            self._part = self._scattered.view(comm.size, -1)[comm.index]
            self._scatter = _ReduceScatter(comm, self._scattered, self._part)
            self._departure = self._scatter.departure
        if self._rest.numel():
            is_few_bytes = self._rest.nbytes <= _SMALL_BYTES
            kind = _ByTheFirst if is_few_bytes and comm.size >= _MANY_MEMBERS else _ToAll
            self._whole = kind(comm, self._rest)
            self._departure = self._departure if num_scattered else self._whole.departure

    def advance(self) -> None:
        if self._scatter is not None:
            with self._comm.waiting(Op.ALL_REDUCE, Waited(departure=self._departure)):
                self._advance(self._scatter)

    def _advance(self, scatter: _ReduceScatter) -> None:
        scatter.complete()
        self._scatter = None
        rows = self._scattered.view(self._comm.size, -1)
        self._gather = self._comm.gather_rows(self._part, rows, Op.ALL_REDUCE)
        self._departure = self._gather.departure

    def wait(self) -> None:
        with self._comm.waiting(Op.ALL_REDUCE, Waited(departure=self._departure)):
            self.complete()

    def complete(self) -> None:
        """Wait as a part of an operation that the black box already knows."""
        if self._scatter is not None:
            self._advance(self._scatter)
        if self._whole is not None:
            self._whole.complete()
        if self._gather is not None:
            self._gather.complete()


class _ToAll:
    """An all-reduce in which everybody gets everything, and sums it."""

    def __init__(self, comm: GlooComm, flat: Tensor) -> None:
        self._flat = flat
        self._parts = list(flat.new_empty((comm.size, flat.numel())))
        self._parts[comm.index] = flat
        self._exchange = _Exchange(comm, self._parts, Op.ALL_REDUCE)
        self._exchange.send([flat] * comm.size)

    @property
    def departure(self) -> Departure:
        return self._exchange.departure

    def complete(self) -> None:
        self._exchange.complete()
        sum_in_order(self._parts, self._flat)


class _ByTheFirst:
    """An all-reduce in which the first member gets everything, sums it and sends the sum."""

    def __init__(self, comm: GlooComm, flat: Tensor) -> None:
        self._comm = comm
        self._flat = flat
        self._tag = comm.next_tag()
        if comm.index == 0:
            self._parts = [flat, *flat.new_empty((comm.size - 1, flat.numel()))]
            self._works = [comm.post_recv(self._parts[p], p, self._tag) for p in comm.peers]
        else:
            # The sum comes once this has been taken: it may take its place.
            self._works = [comm.post_recv(flat, 0, self._tag), comm.post_send(flat, 0, self._tag)]
        self.departure = comm.departed()

    def complete(self) -> None:
        for work in self._works:
            work.wait()
        if self._comm.index == 0:
            sum_in_order(self._parts, self._flat)
            for work in [self._comm.post_send(self._flat, p, self._tag) for p in self._comm.peers]:
                work.wait()
        self._comm.landed()
