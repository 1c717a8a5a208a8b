"""What ranks of a pipeline do in tests, with chunks that stand in for a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.trainer.bubble import wait
from outlast.blackbox import Group, Op, OpRecord, Reader, Writer
from outlast.layout import Layout
from tests.trainer.jobs import mesh_of
from tests.trainer.ranks import RankContext
from trainer.core import schedule as schedules
from trainer.core.schedule import Schedule
from trainer.parallel.comm import FIRST_FREE_TAG, NOTHING_KNOWN, Comm, Pending, Waited
from trainer.parallel.mailbox import Mailbox
from trainer.parallel.mesh import Mesh
from trainer.parallel.pipeline import MicroBatch, PipelineEngine

SHAPE = (4, 2)
"""[S, B] of a micro-batch, and of what goes between two chunks."""
FACTOR = 1.5
"""Every chunk multiplies by it."""


class StandIn(nn.Module):
    """Multiplies tokens by FACTOR on every chunk, and by the targets on the last."""

    def __init__(self, mesh: Mesh, *, is_last: bool, seconds: float = 0.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(FACTOR, dtype=torch.float64))
        self._gradients = mesh.weight_gradients
        self.begun: list[tuple[int, int]] = []
        self._is_last = is_last
        self._seconds = seconds

    def begin(self, step: int, micro_batch: int) -> None:
        self.begun.append((step, micro_batch))

    def forward(
        self, tokens: Tensor, hidden: Tensor | None, targets: Tensor, *_others: object
    ) -> Tensor:
        x = (tokens.double() if hidden is None else hidden) * self.factor
        out = wait(x, self.factor, self._seconds, self._gradients)
        return (out * targets).sum() if self._is_last else out


class HookLog:
    """Writes down every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def before_forward(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(("before forward", chunk, micro_batch))

    def after_forward(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(("after forward", chunk, micro_batch))

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(("before backward", chunk, micro_batch))

    def after_backward(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        self.calls.append(("after last backward" if last else "after backward", chunk, micro_batch))

    def after_inputs(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        self.calls.append(("after last inputs" if last else "after inputs", chunk, micro_batch))

    def before_weights(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(("before weights", chunk, micro_batch))

    def after_weights(self, chunk: int, micro_batch: int) -> None:
        self.calls.append(("after weights", chunk, micro_batch))


def batches(count: int) -> list[MicroBatch]:
    """No two alike, so that a message that takes another's place is noticed."""
    numbers = torch.randperm(count * 16, generator=torch.Generator().manual_seed(5))
    parts = numbers.view(count, 2, *SHAPE)
    return [MicroBatch(tokens=tokens, targets=targets) for tokens, targets in parts]


def stand_ins(mesh: Mesh, num_chunks: int, *, seconds: float = 0.0) -> list[StandIn]:
    """This stage's chunks of a model of waits."""
    return [
        StandIn(mesh, is_last=mesh.has_loss and chunk == num_chunks - 1, seconds=seconds)
        for chunk in range(num_chunks)
    ]


def run_stand_ins(
    context: RankContext, layout: Layout, schedule: Schedule, seconds: float
) -> dict[str, Any]:
    """A step of waits: what was called in which order, and where the time went."""
    mesh = mesh_of(context, layout, tied=False, folds=schedule.folds)
    chunks = stand_ins(mesh, schedule.num_chunks, seconds=seconds)
    hooks = HookLog()
    engine = PipelineEngine(chunks, mesh, schedule, boundary=SHAPE, hooks=hooks)
    loss = engine.run(batches(schedule.num_micro_batches), 1.0, step=7)
    timing = engine.last_timing
    return {
        "loss": loss.item(),
        "grads": [chunk.factor.grad.item() for chunk in chunks if chunk.factor.grad is not None],
        "order": engine.order,
        "calls": hooks.calls,
        "begun": [chunk.begun for chunk in chunks],
        "training": [chunk.training for chunk in chunks],
        "times_s": (timing.busy_s, timing.waited_s, timing.elapsed_s),
        "messages_s": (mesh.pp.in_flight_ns / 1e9, mesh.pp.waited_ns / 1e9),
    }


@dataclass(slots=True)
class _Held:
    """A send that has not been started; `work` is set when it is."""

    tensor: Tensor
    peer: int
    tag: int
    work: Pending | None = None

    def wait(self) -> None:
        assert self.work is not None
        self.work.wait()


class Overtaking(Comm):
    """A network in which every second message overtakes the one before it.

    Without `tags`, messages between two ranks are told apart by their order only.
    """

    def __init__(self, inner: Comm, *, tags: bool) -> None:
        super().__init__(group=inner.group, ranks=inner.ranks, index=inner.index)
        self._inner = inner
        self._tags = tags
        self._held: _Held | None = None

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        own = _Held(tensor, peer, tag if self._tags else FIRST_FREE_TAG)
        if self._held is None:
            self._held = own
            return own
        self._start(own)
        self._release()
        return own

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        return self._inner.post_recv(tensor, peer, tag if self._tags else FIRST_FREE_TAG)

    def wait(self, works: Sequence[Pending], op: Op, waited: Waited = NOTHING_KNOWN) -> None:
        # A rank that waits has nothing left that could overtake.
        self._release()
        self._inner.wait(works, op, waited)

    def _release(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._start(held)

    def _start(self, send: _Held) -> None:
        send.work = self._inner.post_send(send.tensor, send.peer, send.tag)


def overtaken(context: RankContext, tags: bool) -> tuple[float, list[float]]:
    """Two stages of two chunks on a network that changes the order of messages."""
    mesh = mesh_of(context, Layout(pp=2), tied=False)
    comm = Overtaking(mesh.pp, tags=tags)
    mesh = replace(mesh, pp=comm, pp_back=comm)
    chunks = stand_ins(mesh, 2)
    schedule = schedules.build("interleaved", 2, 4, num_chunks=2)
    engine = PipelineEngine(chunks, mesh, schedule, boundary=SHAPE)
    loss = engine.run(batches(4), 1.0).item()
    return loss, [chunk.factor.grad.item() for chunk in chunks if chunk.factor.grad is not None]


class Reluctant(Comm):
    """Bounds the receives that are posted and not waited for, as NCCL's group does."""

    def __init__(self, inner: Comm, most_receives: int) -> None:
        super().__init__(group=inner.group, ranks=inner.ranks, index=inner.index)
        self.most_receives = most_receives
        self.largest = 0
        self._inner = inner
        self._posted: Counter[int] = Counter()
        self._senders: dict[int, int] = {}

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        return self._inner.post_send(tensor, peer, tag)

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        work = self._inner.post_recv(tensor, peer, tag)
        self._senders[id(work)] = peer
        self._posted[peer] += 1
        self.largest = max(self.largest, self._posted[peer])
        return work

    def wait(self, works: Sequence[Pending], op: Op, waited: Waited = NOTHING_KNOWN) -> None:
        self._inner.wait(works, op, waited)
        if op is Op.RECV:
            for work in works:
                self._posted[self._senders.pop(id(work))] -= 1


def run_reluctantly(
    context: RankContext, schedule: Schedule, most_receives: int
) -> tuple[float, int]:
    """The loss of two steps, and the most receives from one stage that were posted at once."""
    layout = Layout(pp=schedule.num_stages)
    mesh = mesh_of(context, layout, tied=False, folds=schedule.folds)
    comm = Reluctant(mesh.pp, most_receives)
    mesh = replace(mesh, pp=comm, pp_back=comm)
    engine = PipelineEngine(stand_ins(mesh, schedule.num_chunks), mesh, schedule, boundary=SHAPE)
    found = batches(schedule.num_micro_batches)
    return engine.run(found, 1.0).item() + engine.run(found, 1.0).item(), comm.largest


def messages_noted(context: RankContext, folder: Path, schedule: Schedule) -> list[OpRecord]:
    """What the black box has of the sends and receives of a step."""
    path = folder / str(context.rank)
    recorder = Writer(path, rank=context.rank, world_size=schedule.num_stages, attempt=1)
    mesh = mesh_of(
        context,
        Layout(pp=schedule.num_stages),
        tied=False,
        recorder=recorder,
        folds=schedule.folds,
    )
    engine = PipelineEngine(stand_ins(mesh, schedule.num_chunks), mesh, schedule, boundary=SHAPE)
    engine.run(batches(schedule.num_micro_batches), 1.0)
    return [each for each in Reader(path).ops() if each.group is Group.PP]


class _Counting(Comm):
    """Counts the numbers that it sends."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(group=inner.group, ranks=inner.ranks, index=inner.index)
        self._inner = inner
        self.sent = 0

    def post_send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        self.sent += tensor.numel()
        return self._inner.post_send(tensor, peer, tag)

    def post_recv(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        return self._inner.post_recv(tensor, peer, tag)

    def wait(self, works: Sequence[Pending], op: Op, waited: Waited = NOTHING_KNOWN) -> None:
        self._inner.wait(works, op, waited)


def numbers_sent(context: RankContext, replicated: bool) -> tuple[float, int]:
    """The loss of one step of tp2 x pp2, and how many numbers this rank sent for it."""
    mesh = mesh_of(context, Layout(tp=2, pp=2), tied=False)
    comm = _Counting(mesh.pp)
    mesh = replace(mesh, pp=comm, pp_back=comm)
    schedule = schedules.build("1f1b", 2, 3)
    engine = PipelineEngine(
        stand_ins(mesh, 1), mesh, schedule, boundary=SHAPE, replicated=replicated
    )
    return engine.run(batches(3), 1.0).item(), comm.sent


def connect(context: RankContext, schedule: Schedule) -> None:
    """Exchange something over every link, one after the other."""
    layout = Layout(pp=schedule.num_stages)
    mesh = mesh_of(context, layout, tied=False, folds=schedule.folds)
    Mailbox(mesh, schedule, torch.empty(1)).connect()
