"""The operations of a process group, with one meaning on every backend.

`Comm` is what the trainer sees. It notes every wait in the black box, so that a
hang names the operation, the group and its sequence number, and it counts what
overlap is judged by: bytes sent, time under way, time waited.

Blocking operations return when the result is there. `start_*` operations return
a `Pending` at once; the result is there after its `wait()`. Any number of them
may be under way in one group, provided that all members start them in the same
order and wait for them in the same order.

The backends are `trainer.parallel.gloo` and `trainer.parallel.nccl`; which
groups exist is decided in `trainer.parallel.mesh`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from outlast.blackbox import Group, Op, OpRecord
from outlast.errors import RetryableError
from trainer.parallel.timeline import Timeline

# Tags from here up to the first one of collectives belong to whoever posts messages.
FIRST_FREE_TAG = 16


class PeerLostError(RetryableError):
    """An operation failed because another rank of the group is gone or silent.

    The rank that raises it is a victim; the culprit is among its peers.
    """


class Recorder(Protocol):
    """The part of the black box that `Comm` writes."""

    def enter(
        self, op: Op, group: Group, detail: int = -1, peer: int = -1, message: int = -1
    ) -> int:
        """An operation starts; the numbers are as in `OpRecord`."""

    def leave(self, departed_ns: int = 0) -> None: ...

    def stands_in(self, operation: OpRecord) -> None:
        """A device has come to an operation that was entered before."""

    def ended(self, operation: OpRecord) -> None:
        """A device has left an operation, which takes the place of `leave`."""


@dataclass(slots=True)
class Departure:
    """When something left that is waited for later; 0 until that is known."""

    at_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """What is waited for, as `OpRecord` says it of the operation."""

    detail: int = -1
    peer: int = -1
    message: int = -1
    departure: Departure = field(default_factory=Departure)


NOTHING_KNOWN = Waited()


class Pending(Protocol):
    """Something under way; after `wait` its result is there."""

    def wait(self) -> Any: ...


class PendingReduce(Pending, Protocol):
    """An all-reduce under way."""

    def advance(self) -> None:
        """Wait for its first half and start the second, where it has two."""


class Exchange(Pending, Protocol):
    """A message from each member to each other one; receives are already posted."""

    def send(self, outgoing: Sequence[Tensor]) -> None:
        """Send `outgoing[i]` to member i; they must stay as they are until `wait`."""


class Nothing:
    """What a group of one has under way."""

    def send(self, outgoing: Sequence[Tensor]) -> None:
        """No member to send to."""

    def advance(self) -> None:
        """Nothing to advance."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Comm:
    """The operations of one group. A group of one does nothing, at no cost.

    `bytes_sent` is what this member has handed to the network. `in_flight_ns` is
    the time during which at least one operation was under way, from its start to
    the end of its `wait`; `waited_ns` is the part of it that was spent waiting:
    exposed communication. The difference is an upper bound of the hidden part,
    because nobody says when a message arrived. On a GPU both are the device's times,
    between what it computes before and after, and known only later.
    """

    # Receives from one member that may be posted and not yet be waited for; None: any number.
    most_receives: int | None = None

    def __init__(self, *, group: Group, ranks: tuple[int, ...], index: int) -> None:
        self.group = group
        self.ranks = ranks
        self.size = len(ranks)
        self.index = index
        # The other members, nearest first, so that not all start with the same one.
        self.peers = tuple((index + offset) % self.size for offset in range(1, self.size))
        self.bytes_sent = 0
        self.waited_ns = 0
        self.in_flight_ns = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a contiguous tensor over the group, in place. Every member gets the same bits."""
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

    def start_all_gather(self, shard: Tensor, out: Tensor) -> Pending:
        """Start to join every member's `shard` along dim 0 of `out`, in group order.

        `out` is contiguous, of `shard`'s type, and has `size` times its rows;
        `shard` may be its own part of `out`. Neither may be touched until `wait`.
        """
        check_parts(shard, out, self.size)
        if not is_same_memory(shard, out):
            out.copy_(shard)
        return Nothing()

    def start_reduce_scatter(
        self, flat: Tensor, out: Tensor, *, wire_dtype: torch.dtype | None = None
    ) -> Pending:
        """Start to sum `flat` over the group; `out` gets this member's part along dim 0.

        `flat` is contiguous and has `size` times the rows of `out`; `out` may be
        its own part of `flat`. Neither may be touched until `wait`. Parts travel
        as `wire_dtype` (half the bytes with bf16 for fp32) and are summed in
        group order in the type of `out`; this member's own part is not rounded.
        """
        check_parts(out, flat, self.size)
        if not is_same_memory(flat, out):
            out.copy_(flat)
        return Nothing()

    def start_all_reduce(self, tensor: Tensor) -> PendingReduce:
        """Start to sum a contiguous tensor over the group, in place."""
        return Nothing()

    def start_exchange(self, incoming: Sequence[Tensor], op: Op) -> Exchange:
        """Get ready to receive `incoming[i]` from member i; the own entry is ignored.

        The messages leave with `send` of the result, which may come much later.
        `op` is the operation that this exchange is a part of.
        """
        return Nothing()

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Consecutive rows for each member, `sent` of them, and those from each, `received`."""
        return rows

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start to send to the member at index `peer`; the tensor must stay as it is."""
        raise ValueError(f"group {self.group.name} has no member to send to")

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Start to receive from the member at index `peer`."""
        raise ValueError(f"group {self.group.name} has no member to receive from")

    def wait(self, works: Sequence[Pending], op: Op, waited: Waited = NOTHING_KNOWN) -> None:
        """Wait for messages under way."""

    def departed(self) -> Departure:
        """Note that an operation is under way from now on."""
        return Departure()

    def landed(self) -> None:
        """Note that an operation under way has ended."""


@dataclass(slots=True)
class _Wait:
    """One wait for other ranks."""

    op: Op
    seq: int
    waited: Waited
    since_ns: int = 0


class BackendComm(Comm):
    """What the real groups share: the black box, the counters, the meaning of errors."""

    def __init__(
        self,
        backend: Any,
        *,
        group: Group,
        ranks: tuple[int, ...],
        index: int,
        recorder: Recorder,
        timeline: Timeline,
    ) -> None:
        super().__init__(group=group, ranks=ranks, index=index)
        self._timeline = timeline
        self.connect(backend, recorder)

    def connect(self, backend: Any, recorder: Recorder) -> None:
        """Go on over another backend, as a group that has just been made."""
        self._backend = backend
        self._recorder = recorder
        self.bytes_sent = 0
        self.waited_ns = 0
        self.in_flight_ns = 0
        self._num_in_flight = 0
        self._in_flight_since_ns = 0

    def disconnect(self) -> None:
        """Let go of the backend, whose connections end with it. Nothing may be asked until
        `connect`."""
        self._backend = None

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        incoming = torch.split(out, list(received))
        outgoing = torch.split(rows.contiguous(), list(sent))
        exchange = self.start_exchange(incoming, Op.ALL_TO_ALL)
        exchange.send(outgoing)
        incoming[self.index].copy_(outgoing[self.index])
        exchange.wait()
        return out

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        try:
            work: Pending = self._backend.send([tensor], peer, tag)
        except RuntimeError as error:
            raise self._lost("send", error) from error
        self.bytes_sent += tensor.nbytes
        return work

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        try:
            work: Pending = self._backend.recv([tensor], peer, tag)
        except RuntimeError as error:
            raise self._lost("recv", error) from error
        return work

    def wait(self, works: Sequence[Pending], op: Op, waited: Waited = NOTHING_KNOWN) -> None:
        with self.waiting(op, waited):
            for work in works:
                work.wait()

    def departed(self) -> Departure:
        departure = Departure()
        self._timeline.stamp(partial(self._depart, departure))
        return departure

    def landed(self) -> None:
        self._timeline.stamp(self._land)

    @contextmanager
    def waiting(self, op: Op, waited: Waited = NOTHING_KNOWN) -> Iterator[None]:
        """Around whatever can wait for another rank.

        Raises:
            PeerLostError: what is inside failed.
        """
        about = (waited.detail, waited.peer, waited.message)
        wait = _Wait(op, self._recorder.enter(op, self.group, *about), waited)
        self._timeline.stamp(partial(self._begin_wait, wait))
        try:
            yield
        except (RuntimeError, PeerLostError) as error:
            # The box keeps saying "in" this operation: that is what happened.
            raise self._lost(f"{op.name.lower()} #{wait.seq}", error) from error
        self._timeline.stamp(partial(self._end_wait, wait))

    def _depart(self, departure: Departure, now_ns: int) -> None:
        departure.at_ns = now_ns
        self._fly(now_ns)

    def _fly(self, now_ns: int) -> None:
        if self._num_in_flight == 0:
            self._in_flight_since_ns = now_ns
        self._num_in_flight += 1

    def _land(self, now_ns: int) -> None:
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self.in_flight_ns += now_ns - self._in_flight_since_ns

    def _begin_wait(self, wait: _Wait, now_ns: int) -> None:
        wait.since_ns = now_ns
        self._fly(now_ns)
        # While the host gives work, the box says what it gives: that may block too.
        if self._timeline.is_waited_for:
            self._recorder.stands_in(self._record(wait, 0))

    def _end_wait(self, wait: _Wait, now_ns: int) -> None:
        self.waited_ns += now_ns - wait.since_ns
        self._land(now_ns)
        if self._timeline.is_async:
            self._recorder.ended(self._record(wait, now_ns))
        else:
            self._recorder.leave(wait.waited.departure.at_ns)

    def _record(self, wait: _Wait, end_ns: int) -> OpRecord:
        return OpRecord(
            op=wait.op,
            group=self.group,
            seq=wait.seq,
            detail=wait.waited.detail,
            start_ns=wait.since_ns,
            end_ns=end_ns,
            departed_ns=wait.waited.departure.at_ns,
            peer=wait.waited.peer,
            message=wait.waited.message,
        )

    def _lost(self, what: str, error: Exception) -> PeerLostError:
        group = self.group.name.lower()
        return PeerLostError(f"{group} {what} among ranks {list(self.ranks)} failed: {error}")


def check_parts(part: Tensor, whole: Tensor, num_parts: int) -> None:
    """Refuse a whole that is not `num_parts` times its part, or has gaps.

    Raises:
        ValueError: and says what both are.
    """
    if part.numel() * num_parts != whole.numel() or not whole.is_contiguous():
        raise ValueError(
            f"a group of {num_parts} needs a contiguous tensor of {num_parts} times "
            f"{tuple(part.shape)}, got {tuple(whole.shape)} with strides {whole.stride()}"
        )


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors start at the same place."""
    return one.data_ptr() == other.data_ptr()


def sum_in_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Sum at least two tensors into `out`, first one first: the order never varies.

    `out` may be one of the parts. Additions are done in the type of `out`.
    """
    if len(parts) == 2:
        return torch.add(parts[0].to(out.dtype), parts[1], out=out)
    total = parts[0].to(out.dtype) + parts[1]
    for part in parts[2:-1]:
        total += part
    return torch.add(total, parts[-1], out=out)
