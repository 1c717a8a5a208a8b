"""The messages of one pipeline step on one rank.

Receives are posted ahead, per sender in the order in which it sends, each into
a buffer of its channel. A buffer is free again after its message's last use; then
the next receive takes it. `trainer.core.schedule.messages` says how many
buffers a channel needs so that no send ever waits for a late receiver.

All is posted ahead only as far as the schedule can need: posting a whole step
would hold as many buffers as there are micro-batches, and on NCCL, which has no
tags, a receive must not be posted before one whose message comes first. There even
fewer are posted: each is a kernel that keeps its stream until the message comes.

Every message has a tag of its own, so that with two stages and several chunks,
where the next stage is also the previous one, none takes another's place.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outlast.blackbox import Op
from trainer.core.schedule import Schedule
from trainer.core.schedule.messages import Channel, Message, arrivals, links, num_buffers
from trainer.parallel.comm import FIRST_FREE_TAG, Comm, Departure, Pending, Waited
from trainer.parallel.mesh import Mesh


@dataclass(slots=True)
class _Received:
    """A posted receive; `work` is None once it was waited for."""

    work: Pending | None
    buffer: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sent:
    """A message under way; its tensor is kept until it has arrived."""

    message: Message
    work: Pending
    tensor: Tensor
    departure: Departure


class Mail(Protocol):
    """Where the engine takes messages from and sends them to."""

    def open(self) -> None: ...

    def take(self, message: Message) -> Tensor: ...

    def release(self, message: Message) -> None: ...

    def send(self, message: Message, tensor: Tensor) -> None: ...

    def close(self) -> None: ...


class NoMail:
    """A mailbox that reaches nobody: what is taken is zeros, what is sent is dropped."""

    def __init__(self, like: Tensor) -> None:
        self._zeros = torch.zeros_like(like)

    def open(self) -> None:
        """Nothing to post."""

    def take(self, message: Message) -> Tensor:
        return self._zeros

    def release(self, message: Message) -> None:
        """Nothing to post."""

    def send(self, message: Message, tensor: Tensor) -> None:
        """Nobody receives it."""

    def close(self) -> None:
        """Nothing is under way."""


class Mailbox:
    """Posts, waits and keeps buffers; knows nothing of what messages hold."""

    def __init__(self, mesh: Mesh, schedule: Schedule, like: Tensor) -> None:
        """`like` has the shape, type and device of every message."""
        stage = mesh.at.pp
        neighbours = {(stage + 1) % schedule.num_stages, (stage - 1) % schedule.num_stages}
        buffers = num_buffers(schedule, {stage, *neighbours})
        self._mesh = mesh
        self._num_micro_batches = schedule.num_micro_batches
        self._links = links(schedule)
        # gloo's groups are connected once they exist.
        self._connected = mesh.device.type != "cuda"
        self._arrivals = arrivals(schedule, stage)
        self._free = {
            channel: [like.new_empty(like.shape) for _ in range(count)]
            for channel, count in buffers[stage].items()
        }
        # As many sends may be under way as the receiver has buffers for.
        self._capacity = {
            (receiver, channel): count
            for receiver in neighbours
            for channel, count in buffers[receiver].items()
        }
        self._expected: dict[int, deque[Message]] = {}
        # Of each sender, receives that are posted and not yet waited for.
        self._num_posted: dict[int, int] = {}
        self._received: dict[Message, _Received] = {}
        self._sends: dict[tuple[int, Channel], deque[_Sent]] = {}

    def connect(self) -> None:
        """Exchange one number over every link of this stage.

        NCCL connects two ranks at their first message and blocks both until then;
        two that each begin with a receive from the other would wait for ever.
        """
        stage = self._mesh.at.pp
        number = torch.zeros(1, device=self._mesh.device)
        for sender, receiver in self._links:
            comm = self._comm(sender, receiver)
            if stage == sender:
                comm.wait([comm.post_send(number, receiver, FIRST_FREE_TAG)], Op.SEND)
            elif stage == receiver:
                comm.wait([comm.post_recv(number, sender, FIRST_FREE_TAG)], Op.RECV)
        self._connected = True

    def open(self) -> None:
        """Begin a step: post what there is a buffer for, as far as the group allows."""
        if not self._connected:
            self.connect()
        self._expected = {sender: deque(messages) for sender, messages in self._arrivals.items()}
        self._num_posted = dict.fromkeys(self._expected, 0)
        self._sends = {}
        for sender in self._expected:
            self._post(sender)

    def take(self, message: Message) -> Tensor:
        """Wait for a message; the tensor is good until `release`."""
        while message not in self._received:
            # What is needed now is posted, however many are waiting.
            self._post_next(message.sender)
        received = self._received[message]
        assert received.work is not None, "a message is taken once"
        waited = Waited(
            detail=message.micro_batch, peer=message.sender, message=self._number(message)
        )
        self._comm(message.sender, message.receiver).wait([received.work], Op.RECV, waited)
        received.work = None
        self._num_posted[message.sender] -= 1
        self._post(message.sender)
        return received.buffer

    def release(self, message: Message) -> None:
        """The message was used for the last time: its buffer takes the next one."""
        self._free[message.channel].append(self._received.pop(message).buffer)
        self._post(message.sender)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start to send; the tensor is kept, and must stay as it is, until that has ended."""
        channel = (message.receiver, message.channel)
        under_way = self._sends.setdefault(channel, deque())
        if len(under_way) == self._capacity[channel]:
            self._wait_for_send(under_way.popleft())
        comm = self._comm(message.sender, message.receiver)
        departure = comm.departed()
        work = comm.post_send(tensor, message.receiver, self._tag(message))
        sent = _Sent(message=message, work=work, tensor=tensor, departure=departure)
        under_way.append(sent)

    def close(self) -> None:
        """End a step: every send has ended, every message was used."""
        for under_way in self._sends.values():
            for sent in under_way:
                self._wait_for_send(sent)
        self._sends = {}
        assert not self._received, f"messages were not used: {list(self._received)}"

    def _post(self, sender: int) -> None:
        # Strictly in the sender's order. When the first has no free buffer, it cannot
        # have been sent yet, and so neither can those after it.
        expected, most = self._expected[sender], self._comm(sender, self._mesh.at.pp).most_receives
        while expected and self._free[expected[0].channel]:
            if most is not None and self._num_posted[sender] >= most:
                return
            self._post_next(sender)

    def _post_next(self, sender: int) -> None:
        message = self._expected[sender].popleft()
        buffer = self._free[message.channel].pop()
        work = self._comm(message.sender, message.receiver).post_recv(
            buffer, sender, self._tag(message)
        )
        self._received[message] = _Received(work, buffer)
        self._num_posted[sender] += 1

    def _wait_for_send(self, sent: _Sent) -> None:
        message = sent.message
        comm = self._comm(message.sender, message.receiver)
        waited = Waited(
            detail=message.micro_batch,
            peer=message.receiver,
            message=self._number(message),
            departure=sent.departure,
        )
        comm.wait([sent.work], Op.SEND, waited)
        comm.landed()

    def _comm(self, sender: int, receiver: int) -> Comm:
        # One group for each way between two ranks: NCCL runs what two ranks exchange
        # in a group in order, so a receive posted ahead would hold up a send.
        return self._mesh.pp if sender < receiver else self._mesh.pp_back

    def _tag(self, message: Message) -> int:
        return FIRST_FREE_TAG + self._number(message)

    def _number(self, message: Message) -> int:
        return message.number(self._num_micro_batches)
