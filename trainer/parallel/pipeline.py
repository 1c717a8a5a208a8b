"""The engine that executes a pipeline schedule.

Receives are posted ahead and no send is waited for before its buffer is
needed again (`trainer.parallel.mailbox`): a late neighbour delays only the
action that truly needs its message. Which action comes when is the schedule's
business (`trainer.core.schedule`), what an action computes is the chunk's
(`trainer.model.gpt`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from trainer.core.schedule import Action, ActionKind, Schedule
from trainer.core.schedule.messages import (
    Message,
    handed_over,
    incoming,
    last_used,
    outgoing,
)
from trainer.parallel.backward import backward
from trainer.parallel.boundary import Boundary
from trainer.parallel.hooks import ChunkHooks, NoHooks
from trainer.parallel.mailbox import Mail, Mailbox, NoMail
from trainer.parallel.mesh import Mesh
from trainer.parallel.timeline import timed
from trainer.parallel.weight_gradients import Products, add_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentences:
    """The two parts of each sequence, whose order is predicted.

    `segments` has 0 or 1 for each token, [S, B]; `swapped` 1 for each sequence whose second part
    comes first, [B]. What the stage does not use may be empty.
    """

    segments: Tensor
    swapped: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What a rank takes of a replica's micro-batch: [S, B] token ids.

    Where ranks divide the sequence, tokens and targets are those of the rank's part.
    A target below 0 has no loss. `starts` has for each token where its document begins in the
    sequence; None: a sequence is all one. `num_predicted` is how many targets have a loss. What
    the stage does not use may be empty, or 0.
    """

    tokens: Tensor
    targets: Tensor
    starts: Tensor | None = None
    sentences: Sentences | None = None
    num_predicted: int = 0


class Chunk(Protocol):
    """What the engine needs of consecutive layers of a model.

    A call gives the hidden state for the next chunk, or the summed loss on the
    last one; where sequences have a loss, too, both sums. `hidden` is None for the first
    chunk. What a call and its backward pass give is never a view of what they got: those
    buffers are used again.
    """

    def begin(self, step: int, micro_batch: int) -> None:
        """What is computed next: `micro_batch` counts over the whole global batch."""

    def train(self, mode: bool = True) -> object:
        """Compute as in training, or as in evaluation."""

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def __call__(
        self,
        tokens_SB: Tensor,
        hidden: Tensor | None,
        targets_SB: Tensor,
        starts_SB: Tensor | None,
        sentences: Sentences | None,
        /,
    ) -> Tensor: ...


@dataclass(slots=True)
class StepTiming:
    """Where the time of one `run` went.

    `busy_s` was spent in chunks, `waited_s` waiting for messages. The rest of
    `elapsed_s` is hooks and bookkeeping. On CUDA these are the device's times, which
    are there once the mesh's timeline has finished.
    """

    busy_s: float = 0.0
    waited_s: float = 0.0
    elapsed_s: float = 0.0

    def add_busy(self, ns: int) -> None:
        self.busy_s += ns / 1e9

    def add_waited(self, ns: int) -> None:
        self.waited_s += ns / 1e9

    def add_elapsed(self, ns: int) -> None:
        self.elapsed_s += ns / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """An action and what the schedule says about it.

    `hands_to` is the chunk of this stage that takes what it makes, where that is no message.
    """

    action: Action
    needs: Message | None
    makes: Message | None
    hands_to: int | None
    last_used: tuple[Message, ...]
    is_last_backward: bool


@dataclass(slots=True, kw_only=True)
class _Step:
    """What lives for the length of one step; keys are (chunk, micro-batch).

    `handed` has what one chunk of this stage has made for another one.
    """

    mail: Mail
    micro_batches: Sequence[MicroBatch]
    loss_scale: float | Tensor
    number: int
    first_micro_batch: int
    loss: Tensor
    inputs: dict[tuple[int, int], Tensor | None] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    products: dict[tuple[int, int], Products] = field(default_factory=dict)
    handed: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class PipelineEngine:
    """Runs this rank's part of a schedule on its chunks of the model.

    `order` is what a step does, first to last; `last_timing` tells where the time
    of the last one went.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        mesh: Mesh,
        schedule: Schedule,
        *,
        boundary: tuple[int, ...],
        replicated: bool = False,
        hooks: ChunkHooks | None = None,
    ) -> None:
        """`chunks[c]` is chunk `c` of this rank's stage.

        `boundary` is the shape of the tensor between two chunks on this rank,
        `replicated` whether all ranks of the tensor group have the same one.
        """
        if (schedule.num_stages, schedule.num_chunks) != (mesh.layout.pp, len(chunks)):
            raise ValueError(
                f"schedule {schedule.name} is for {schedule.num_stages} stages of "
                f"{schedule.num_chunks} chunks; this engine runs {mesh.layout.pp} stages "
                f"of {len(chunks)}"
            )
        if schedule.folds is not mesh.folds:
            raise ValueError(f"schedule {schedule.name} and the mesh place chunks differently")
        self.order = schedule.actions[mesh.at.pp]
        self.last_timing = StepTiming()
        self._chunks = tuple(chunks)
        self._hooks = hooks or NoHooks()
        self._boundary = Boundary(shape=boundary, replicas=mesh.tp if replicated else None)
        self._timeline = mesh.timeline
        self._weight_gradients = mesh.weight_gradients
        self._trains = schedule.trains
        self._splits = any(action.kind is ActionKind.BACKWARD_INPUT for action in self.order)
        self._replica = mesh.replica
        self._num_micro_batches = schedule.num_micro_batches
        self._loss_chunk = schedule.loss_chunk(mesh.at.pp)
        self._work = _work(schedule, mesh.at.pp)
        dtype = next(iter(chunks[0].parameters())).dtype
        like = torch.empty(self._boundary.message_shape, dtype=dtype, device=mesh.device)
        self._mailbox = Mailbox(mesh, schedule, like)
        self._no_mail = NoMail(like)
        # Sums of losses need more digits than activations do.
        self._zero_loss = torch.zeros(
            (), dtype=torch.promote_types(dtype, torch.float32), device=mesh.device
        )

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        loss_scale: float | Tensor,
        *,
        step: int = 0,
        replica: int | None = None,
    ) -> Tensor:
        """Run the schedule; gradients add up in the parameters.

        `replica` is whose micro-batches these are, None for the own ones. Returns the sum of
        the micro-batches' losses times `loss_scale` where the model ends, zero elsewhere; where a
        chunk gives two sums, `loss_scale` has a factor for each.
        """
        state = _Step(
            mail=self._mailbox,
            micro_batches=micro_batches,
            loss_scale=loss_scale,
            number=step,
            first_micro_batch=self._first_micro_batch(replica),
            loss=self._zero_loss.clone(),
        )
        self._run(state)
        return state.loss

    def warm_up(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Do as in `run`, hooks included, but with zeros for the other stages' messages.

        Gradients add up in the parameters, and mean nothing.
        """
        state = _Step(
            mail=self._no_mail,
            micro_batches=micro_batches,
            loss_scale=1.0,
            number=0,
            first_micro_batch=self._first_micro_batch(None),
            loss=self._zero_loss.clone(),
        )
        self._run(state)

    def _first_micro_batch(self, replica: int | None) -> int:
        """The number of a replica's first micro-batch in the whole global batch."""
        return (self._replica if replica is None else replica) * self._num_micro_batches

    def _run(self, state: _Step) -> None:
        self.last_timing = StepTiming()
        for chunk in self._chunks:
            chunk.train(self._trains)
        self._weight_gradients.splits = self._splits
        with timed(self._timeline, self.last_timing.add_elapsed):
            self._run_schedule(state)

    def _run_schedule(self, state: _Step) -> None:
        state.mail.open()
        for work in self._work:
            match work.action.kind:
                case ActionKind.FORWARD:
                    self._forward(state, work)
                case ActionKind.BACKWARD | ActionKind.BACKWARD_INPUT:
                    self._backward(state, work)
                case ActionKind.BACKWARD_WEIGHT:
                    self._weights(state, work)
        with self._waiting():
            state.mail.close()

    def _forward(self, state: _Step, work: _Work) -> None:
        index, number = work.action.chunk, work.action.micro_batch
        batch, chunk = state.micro_batches[number], self._chunks[index]
        self._hooks.before_forward(index, number)
        hidden = self._take(state, work)
        if hidden is not None:
            # A tensor of its own on the same storage: a leaf for this micro-batch.
            hidden = hidden.detach().requires_grad_(self._trains)
        chunk.begin(state.number, state.first_micro_batch + number)
        with self._computing(), torch.set_grad_enabled(self._trains):
            output = chunk(batch.tokens, hidden, batch.targets, batch.starts, batch.sentences)
            if index == self._loss_chunk:
                output = output * state.loss_scale
                # Of sequences and tokens; else it is one number already.
                output = output.sum() if output.dim() else output
        if index == self._loss_chunk:
            state.loss += output.detach()
        if self._trains:
            state.inputs[index, number], state.outputs[index, number] = hidden, output
        self._release(state, work)
        self._pass_on(state, work, output)
        self._hooks.after_forward(index, number)

    def _backward(self, state: _Step, work: _Work) -> None:
        key = index, number = work.action.chunk, work.action.micro_batch
        self._hooks.before_backward(index, number)
        grad = self._take(state, work)
        hidden = state.inputs.pop(key)
        splits = work.action.kind is ActionKind.BACKWARD_INPUT
        with self._computing():
            if splits:
                with self._weight_gradients.put_off() as state.products[key]:
                    backward(state.outputs.pop(key), grad)
            else:
                backward(state.outputs.pop(key), grad)
        self._release(state, work)
        if hidden is not None:
            assert hidden.grad is not None, "a chunk's output depends on its input"
            self._pass_on(state, work, hidden.grad)
        after = self._hooks.after_inputs if splits else self._hooks.after_backward
        after(index, number, last=work.is_last_backward)

    def _weights(self, state: _Step, work: _Work) -> None:
        """What `_backward` has left to do."""
        key = index, number = work.action.chunk, work.action.micro_batch
        self._hooks.before_weights(index, number)
        with self._computing():
            add_up(state.products.pop(key))
        self._release(state, work)
        self._hooks.after_weights(index, number)

    def _take(self, state: _Step, work: _Work) -> Tensor | None:
        """What the chunk before, or behind in a backward pass, has made; None at an end."""
        if work.needs is None:
            return state.handed.pop((work.action.chunk, work.action.micro_batch), None)
        with self._waiting():
            return self._boundary.incoming(state.mail.take(work.needs))

    def _release(self, state: _Step, work: _Work) -> None:
        # Before the send: gloo sends only to a receiver that has said it is ready, and
        # what says so would have to queue behind the message.
        for message in work.last_used:
            state.mail.release(message)

    def _pass_on(self, state: _Step, work: _Work, tensor: Tensor) -> None:
        if work.hands_to is not None:
            state.handed[work.hands_to, work.action.micro_batch] = tensor.detach()
        if work.makes is not None:
            with self._waiting():
                state.mail.send(work.makes, self._boundary.outgoing(tensor.detach()))

    def _computing(self) -> AbstractContextManager[None]:
        return timed(self._timeline, self.last_timing.add_busy)

    def _waiting(self) -> AbstractContextManager[None]:
        return timed(self._timeline, self.last_timing.add_waited)


def _work(schedule: Schedule, stage: int) -> tuple[_Work, ...]:
    order = schedule.actions[stage]
    backwards = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
    last_backwards = {action.chunk: action for action in order if action.kind in backwards}
    return tuple(
        _Work(
            action=action,
            needs=incoming(schedule, stage, action),
            makes=outgoing(schedule, stage, action),
            hands_to=handed_over(schedule, stage, action),
            last_used=last_used(schedule, stage, action),
            is_last_backward=last_backwards.get(action.chunk) is action,
        )
        for action in order
    )
