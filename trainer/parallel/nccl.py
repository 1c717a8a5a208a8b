"""`Comm` over NCCL: native collectives, in stream order on the device.

Every operation runs on the backend's own stream, which first waits for what the
current stream has been given, and `wait` makes the current stream wait for it
in turn: events on the device, no synchronisation of the host. What is computed
between start and wait overlaps.

Kept to one call of the backend per operation: the tests ask the same of gloo's
process group, but the order of streams is what only two GPUs could show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from outlast.blackbox import Op
from trainer.parallel.aborting import abort_backends
from trainer.parallel.comm import (
    BackendComm,
    Comm,
    Departure,
    Exchange,
    Pending,
    PendingReduce,
    Waited,
    check_parts,
    sum_in_order,
)


class NcclComm(BackendComm):
    """Native collectives; `bytes_sent` counts what a ring sends."""

    # The one that spins on the device and the one behind it. CUDA does not promise that
    # streams progress apart from each other (NVIDIA/nccl#783): the fewer wait, the better.
    most_receives = 2

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.start_all_reduce(tensor).wait()
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        with self.waiting(Op.ALL_REDUCE):
            self._backend.allreduce([tensor], options).wait()
        self.bytes_sent += 2 * self._others_share(tensor)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        joined = tensor.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self.start_all_gather(tensor, joined).wait()
        return joined

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        part = tensor.new_empty((tensor.shape[0] // self.size, *tensor.shape[1:]))
        self.start_reduce_scatter(tensor.contiguous(), part).wait()
        return part

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = root
        with self.waiting(Op.BROADCAST, Waited(detail=root)):
            self._backend.broadcast([tensor], options).wait()
        self.bytes_sent += tensor.nbytes if self.index == root else 0
        return tensor

    def start_all_gather(self, shard: Tensor, out: Tensor) -> Pending:
        check_parts(shard, out, self.size)
        work = self._backend._allgather_base(out, shard.contiguous())
        return self._under_way(work, Op.ALL_GATHER, self._others_share(out))

    def start_reduce_scatter(
        self, flat: Tensor, out: Tensor, *, wire_dtype: torch.dtype | None = None
    ) -> Pending:
        check_parts(out, flat, self.size)
        wire_dtype = wire_dtype or flat.dtype
        if not wire_dtype == flat.dtype == out.dtype:
            return _RoundedReduceScatter(self, flat, out, wire_dtype)
        work = self._backend._reduce_scatter_base(out, flat)
        return self._under_way(work, Op.REDUCE_SCATTER, self._others_share(flat))

    def start_all_reduce(self, tensor: Tensor) -> PendingReduce:
        work = self._backend.allreduce([tensor])
        return self._under_way(work, Op.ALL_REDUCE, 2 * self._others_share(tensor))

    def start_exchange(self, incoming: Sequence[Tensor], op: Op) -> Exchange:
        return _Exchange(self, incoming, op)

    def exchange_now(self, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]) -> Pending:
        """Receive from and send to every peer, as one operation of the device."""
        self._backend._start_coalescing()
        try:
            for peer in self.peers:
                self.post_recv(incoming[peer], peer, 0)
                self.post_send(outgoing[peer], peer, 0)
        finally:
            # NCCL counts groups of calls by thread: whatever this one does later would be in it.
            work: Pending = self._backend._end_coalescing()
        return work

    @property
    def backend(self) -> Any:
        """torch's process group."""
        return self._backend

    def _under_way(self, work: Pending, op: Op, num_bytes: int) -> _Work:
        self.bytes_sent += num_bytes
        return _Work(self, work, Waited(departure=self.departed()), op)

    def _others_share(self, tensor: Tensor) -> int:
        return tensor.nbytes * (self.size - 1) // self.size


def abort(comms: Iterable[Comm]) -> None:
    """End what the device and this process wait for in these groups, as `abort_backends` does.

    Raises:
        RuntimeError: NCCL cannot.
    """
    abort_backends([comm.backend for comm in comms if isinstance(comm, NcclComm)])


class _Work:
    """A native operation under way."""

    def __init__(self, comm: NcclComm, work: Pending, waited: Waited, op: Op) -> None:
        self._comm = comm
        self._work = work
        self._waited = waited
        self._op = op

    def advance(self) -> None:
        """The device goes from one half to the next by itself."""

    def wait(self) -> None:
        self._comm.wait([self._work], self._op, self._waited)
        self._comm.landed()


class _Exchange:
    """Messages that are received when they are sent.

    A receive posted ahead would keep the stream from everything after it.
    """

    def __init__(self, comm: NcclComm, incoming: Sequence[Tensor], op: Op) -> None:
        self._comm = comm
        self._incoming = incoming
        self._op = op
        self._work: Pending | None = None
        # The tensors must live until the device has sent them.
        self._outgoing: Sequence[Tensor] = ()
        self._departure = Departure()

    def send(self, outgoing: Sequence[Tensor]) -> None:
        self._outgoing = outgoing
        self._departure = self._comm.departed()
        self._work = self._comm.exchange_now(self._incoming, outgoing)

    def wait(self) -> None:
        assert self._work is not None, "an exchange is waited for after its send"
        self._comm.wait([self._work], self._op, Waited(departure=self._departure))
        self._comm.landed()


class _RoundedReduceScatter:
    """Parts that travel in a smaller type and are summed in the larger one."""

    def __init__(self, comm: NcclComm, flat: Tensor, out: Tensor, wire_dtype: torch.dtype) -> None:
        self._out = out
        own = flat.view(comm.size, *out.shape)
        wire = own.to(wire_dtype)
        received = torch.empty_like(wire)
        self._parts = [*received[: comm.index], own[comm.index], *received[comm.index + 1 :]]
        self._exchange = _Exchange(comm, list(received), Op.REDUCE_SCATTER)
        self._exchange.send(list(wire))

    def wait(self) -> None:
        self._exchange.wait()
        sum_in_order(self._parts, self._out)
