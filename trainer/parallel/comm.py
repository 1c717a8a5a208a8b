"""The thin layer between the trainer and a process group.

It gives every group the few operations that the trainer uses, with one meaning
on every backend, and notes each in the black box, so that a hang names the
operation, the group and its sequence number.

On gloo every operation is built from point-to-point messages: gloo's own
reduce-scatter moves the bytes of an all-reduce, its rings cost one process
switch per peer, and a local sum in fixed rank order makes every reduction
bitwise reproducible. Receives are always posted before sends: a gloo send is
a rendezvous, it ends only once its peer has posted the receive.

Which groups exist is decided in `trainer.parallel.mesh`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from outlast.blackbox import Group, Op
from outlast.errors import RetryableError

# Tags of pipeline messages start above the one that collectives use; two
# messages with different tags never take each other's place.
_COLLECTIVE_TAG = 1
FIRST_FREE_TAG = 16
# Below this many bytes an all-reduce sends whole buffers to all peers at once
# (one exchange); above, it reduce-scatters and gathers (two, of fewer bytes).
_SMALL_BYTES = 64 * 1024


class PeerLostError(RetryableError):
    """An operation failed because another rank of the group is gone or silent.

    The rank that raises it is a victim; the culprit is among its peers.
    """


class Recorder(Protocol):
    """The part of the black box that `Comm` writes."""

    def enter(self, op: Op, group: Group, micro_batch: int = -1) -> int: ...

    def leave(self) -> None: ...


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> Any: ...


class Comm:
    """The operations of one group. A group of one does nothing, at no cost."""

    def __init__(self, *, group: Group, ranks: tuple[int, ...], index: int) -> None:
        self.group = group
        self.ranks = ranks
        self.size = len(ranks)
        self.index = index

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the group, in place. Every member gets the same bits."""
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Largest value over the group, in place."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every member's tensor, joined along dim 0 in group order."""
        return tensor

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This member's part along dim 0 of the sum over the group."""
        return tensor

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The tensor of the member at index `root`, in place."""
        return tensor

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start to send to the member at index `peer`; the tensor must stay as it is."""
        raise ValueError(f"group {self.group.name} has no member to send to")

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start to receive from the member at index `peer`."""
        raise ValueError(f"group {self.group.name} has no member to receive from")

    def wait(self, works: Sequence[Pending], op: Op, micro_batch: int = -1) -> None:
        """Wait for messages under way."""


class _BackendComm(Comm):
    """What the real groups share: the black box and the meaning of errors."""

    def __init__(
        self,
        backend: Any,
        *,
        group: Group,
        ranks: tuple[int, ...],
        index: int,
        recorder: Recorder,
    ) -> None:
        super().__init__(group=group, ranks=ranks, index=index)
        self._backend = backend
        self._recorder = recorder

    @contextmanager
    def _operation(self, op: Op, micro_batch: int = -1) -> Iterator[None]:
        seq = self._recorder.enter(op, self.group, micro_batch)
        try:
            yield
        except RuntimeError as error:
            # The box keeps saying "in" this operation: that is what happened.
            raise self._lost(f"{op.name.lower()} #{seq}", error) from error
        self._recorder.leave()

    def _lost(self, what: str, error: RuntimeError) -> PeerLostError:
        group = self.group.name.lower()
        return PeerLostError(f"{group} {what} among ranks {list(self.ranks)} failed: {error}")

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        try:
            work: Pending = self._backend.send([tensor], peer, tag)
        except RuntimeError as error:
            raise self._lost("send", error) from error
        return work

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        try:
            work: Pending = self._backend.recv([tensor], peer, tag)
        except RuntimeError as error:
            raise self._lost("recv", error) from error
        return work

    def wait(self, works: Sequence[Pending], op: Op, micro_batch: int = -1) -> None:
        with self._operation(op, micro_batch):
            for work in works:
                work.wait()


class GlooComm(_BackendComm):
    """Collectives as direct exchanges, summed in group order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._operation(Op.ALL_REDUCE):
            if tensor.nbytes <= _SMALL_BYTES * self.size:
                tensor.copy_(_sum_in_order(self._gather_rows(tensor)))
                return tensor
            flat = tensor.view(-1)
            even = flat.numel() // self.size * self.size
            part = self._reduce_scatter(flat[:even])
            self._gather_into(flat[:even].view(self.size, -1), part)
            if even < flat.numel():
                flat[even:].copy_(_sum_in_order(self._gather_rows(flat[even:])))
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        with self._operation(Op.ALL_REDUCE):
            return tensor.copy_(self._gather_rows(tensor).amax(dim=0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        with self._operation(Op.ALL_GATHER):
            return self._gather_rows(tensor).flatten(0, 1)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        with self._operation(Op.REDUCE_SCATTER):
            return self._reduce_scatter(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        with self._operation(Op.BROADCAST):
            if self.index == root:
                works = [
                    self._backend.send([tensor], peer, _COLLECTIVE_TAG) for peer in self._peers()
                ]
            else:
                works = [self._backend.recv([tensor], root, _COLLECTIVE_TAG)]
            for work in works:
                work.wait()
        return tensor

    def _peers(self) -> list[int]:
        """The other members, nearest first, so that not all start with the same one."""
        return [(self.index + offset) % self.size for offset in range(1, self.size)]

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        """Every member's tensor, stacked in group order."""
        rows = tensor.new_empty((self.size, *tensor.shape))
        self._gather_into(rows, tensor.contiguous())
        return rows

    def _gather_into(self, rows: Tensor, own: Tensor) -> None:
        tag = _COLLECTIVE_TAG
        works = [self._backend.recv([rows[peer]], peer, tag) for peer in self._peers()]
        works += [self._backend.send([own], peer, tag) for peer in self._peers()]
        rows[self.index].copy_(own)
        for work in works:
            work.wait()

    def _reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Exchange parts, then sum locally in group order."""
        tag = _COLLECTIVE_TAG
        parts = tensor.contiguous().view(self.size, tensor.shape[0] // self.size, *tensor.shape[1:])
        received = torch.empty_like(parts)
        works = [self._backend.recv([received[peer]], peer, tag) for peer in self._peers()]
        works += [self._backend.send([parts[peer]], peer, tag) for peer in self._peers()]
        received[self.index].copy_(parts[self.index])
        for work in works:
            work.wait()
        return _sum_in_order(received)


class NcclComm(_BackendComm):
    """Native collectives; they run on the device in stream order."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self._operation(Op.ALL_REDUCE):
            self._backend.allreduce([tensor]).wait()
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        with self._operation(Op.ALL_REDUCE):
            self._backend.allreduce([tensor], options).wait()
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        joined = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        with self._operation(Op.ALL_GATHER):
            self._backend._allgather_base(joined, tensor.contiguous()).wait()
        return joined

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        part = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        with self._operation(Op.REDUCE_SCATTER):
            self._backend._reduce_scatter_base(part, tensor.contiguous()).wait()
        return part

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = root
        with self._operation(Op.BROADCAST):
            self._backend.broadcast([tensor], options).wait()
        return tensor


def _sum_in_order(rows: Tensor) -> Tensor:
    """Sum over dim 0, first row first: the order of additions never varies."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
