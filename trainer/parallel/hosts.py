"""All ranks of an attempt as one group, through host memory whatever the device.

Only a restore from storage needs it: which ranks talk to each other follows from
two layouts, not from the mesh. Connections are made at the first message between
two ranks, so a job of thousands pays for the few pairs that exchange something.

Messages wait for `timeout_s` at most, far less than training's operations do:
nothing here takes longer than a store's slowest answer.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # re-exports

from checkpoint.restore.peers import Alone, Peers, Pending
from checkpoint.stage.hostcopy import host_bytes
from outlast.blackbox import Group, Op
from trainer.parallel.comm import BackendComm, PeerLostError, Recorder, Waited
from trainer.parallel.gloo_network import lazy_gloo
from trainer.parallel.timeline import HostTimeline

# Whoever waits for a reader waits for its store: two tries of a minute each, and as much
# again for what that reader itself waits for.
TIMEOUT_S = 240.0
# A wait as short as gloo has them.
_AT_ONCE = timedelta(milliseconds=1)
# Of a message that nobody sends; a restore numbers its messages from 0.
_NOBODYS_TAG = 1 << 24


def join_hosts(
    rank: int,
    world_size: int,
    *,
    store: Store | None,
    recorder: Recorder,
    gloo_interface: str = "",
    timeout_s: float = TIMEOUT_S,
) -> Peers:
    """This rank's end of the group of all ranks; nothing is connected yet."""
    if world_size == 1:
        return Alone()
    if store is None:
        raise ValueError(f"a group of {world_size} ranks needs a rendezvous store")
    return _HostGroup(
        lazy_gloo(
            PrefixStore("hosts/", store),
            rank,
            world_size,
            timeout=timedelta(seconds=timeout_s),
            interface=gloo_interface,
        ),
        group=Group.WORLD,
        ranks=tuple(range(world_size)),
        index=rank,
        recorder=recorder,
        timeline=HostTimeline(),
    )


class _HostGroup(BackendComm):
    """The `Peers` of a restore over gloo's own collectives: few connections, small messages."""

    _backend: Any

    def __init__(self, backend: Any, **about: Any) -> None:
        super().__init__(backend, **about)
        self._under_way: set[_Message] = set()
        self._has_met_neighbours = False

    @property
    def rank(self) -> int:
        return self.index

    def largest(self, number: int) -> int:
        row = torch.tensor([number], dtype=torch.int64)
        options = dist.AllreduceOptions()
        # The stubs know two names of one type.
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        with self.waiting(Op.ALL_REDUCE):
            self._backend.allreduce([row], options).wait()
        # Its ring has connected them.
        self._has_met_neighbours = True
        return int(row)

    def gather(self, own: bytes) -> list[bytes]:
        lengths = self._gather_rows(torch.tensor([len(own)], dtype=torch.int64))
        padded = torch.zeros(max(1, *(int(length) for length in lengths)), dtype=torch.uint8)
        padded[: len(own)] = _tensor_of(own)
        rows = self._gather_rows(padded)
        return [
            bytes(host_bytes(row[: int(length)])) for row, length in zip(rows, lengths, strict=True)
        ]

    def from_rank_0(self, own: bytes) -> bytes:
        length = self.largest(len(own) if self.index == 0 else 0)
        content = _tensor_of(own) if self.index == 0 else torch.zeros(length, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        if length:
            with self.waiting(Op.BROADCAST, Waited(detail=options.rootRank)):
                self._backend.broadcast([content], options).wait()
        return bytes(host_bytes(content))

    def send(self, message: Tensor, peer: int, tag: int) -> Pending:
        return self._begun(_Message(self, self.post_send(message, peer, tag), Op.SEND, peer))

    def receive(self, message: Tensor, peer: int, tag: int) -> Pending:
        return self._begun(_Message(self, self.post_recv(message, peer, tag), Op.RECV, peer))

    def abandon(self) -> None:
        """Close all connections, by the one way that gloo has: a wait that runs out.

        Gloo reads for ever, with all of a core, at a message whose receive has been dropped, and
        a backend whose connections are made at their first message cannot be deleted meanwhile.
        """
        pending: list[Any] = [message.work for message in self._under_way]
        if self._has_met_neighbours:
            for peer in {(self.index + 1) % self.size, (self.index - 1) % self.size}:
                with suppress(PeerLostError):
                    nothing = torch.empty(1, dtype=torch.uint8)
                    pending.append(self.post_recv(nothing, peer, _NOBODYS_TAG))
        for work in pending:
            with suppress(RuntimeError):
                work.wait(_AT_ONCE)
        self._under_way.clear()

    def has_ended(self, message: _Message) -> None:
        self._under_way.discard(message)

    def _begun(self, message: _Message) -> _Message:
        self._under_way.add(message)
        return message

    def _gather_rows(self, own: Tensor) -> list[Tensor]:
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with self.waiting(Op.ALL_GATHER):
            self._backend.allgather([rows], [own]).wait()
        return rows


class _Message:
    """A message under way; its wait is in the black box."""

    def __init__(self, comm: _HostGroup, work: Pending, op: Op, peer: int) -> None:
        self._comm = comm
        self.work = work
        self._op = op
        self._peer = peer

    def wait(self) -> None:
        try:
            self._comm.wait([self.work], self._op, Waited(peer=self._peer))
        except PeerLostError as error:
            raise PeerLostError(f"restore waited for rank {self._peer}: {error}") from error
        self._comm.has_ended(self)


def _tensor_of(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
