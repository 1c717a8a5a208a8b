"""The engine that executes a pipeline schedule.

A step's receives are all posted before its first action, each with a tag of
its own, and no send is waited for until the step ends: a late neighbour delays
only the action that truly needs its message. Which action comes when is the
schedule's business (`trainer.core.schedule`), what an action computes is the
stage's (`trainer.model.gpt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

# torch.autograd imports this (and sympy: half a second) at the first backward that is
# given a gradient. Imported here, it is paid before the fork, not in every restart.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor

from outlast.blackbox import Op
from trainer.core.schedule import Action, ActionKind, Schedule
from trainer.model.gpt import GptChunk
from trainer.parallel.comm import FIRST_FREE_TAG, Comm, Pending
from trainer.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What a replica reads for one micro-batch: [S, B] token ids."""

    tokens: Tensor
    targets: Tensor


class ChunkHooks(Protocol):
    """What happens around each use of a chunk (ZeRO gathers and reduces there)."""

    def before_forward(self, chunk: int, micro_batch: int) -> None: ...

    def after_forward(self, chunk: int, micro_batch: int) -> None: ...

    def before_backward(self, chunk: int, micro_batch: int) -> None: ...

    def after_backward(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        """`last`: the chunk's last backward of this step."""


@dataclass(slots=True)
class _Inbox:
    """Posted receives of one direction, by micro-batch."""

    comm: Comm
    buffers: Tensor
    works: dict[int, Pending] = field(default_factory=dict)

    def take(self, micro_batch: int) -> Tensor:
        self.comm.wait([self.works.pop(micro_batch)], Op.RECV, micro_batch)
        return self.buffers[micro_batch]


@dataclass(slots=True)
class _Step:
    """What lives for the length of one step."""

    micro_batches: Sequence[MicroBatch]
    loss: Tensor
    forwards: _Inbox | None = None
    backwards: _Inbox | None = None
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    # A sent tensor must stay alive and unchanged until its send has ended.
    sends: list[tuple[Comm, Pending, Tensor]] = field(default_factory=list)


class PipelineEngine:
    """Runs this rank's part of a schedule on its stage of the model."""

    def __init__(
        self,
        chunk: GptChunk,
        mesh: Mesh,
        schedule: Schedule,
        *,
        boundary: tuple[int, ...],
        hooks: ChunkHooks | None = None,
    ) -> None:
        """`boundary` is the shape of the tensor between two stages on this rank."""
        if schedule.num_stages != mesh.layout.pp or schedule.num_chunks != 1:
            raise ValueError(
                f"schedule {schedule.name} is for {schedule.num_stages} stages of "
                f"{schedule.num_chunks} chunks; this engine runs {mesh.layout.pp} stages of 1"
            )
        self._chunk = chunk
        self._hooks = hooks
        self._mesh = mesh
        self._actions = schedule.actions[mesh.at.pp]
        kinds = {action.kind for action in self._actions}
        if not kinds <= {ActionKind.FORWARD, ActionKind.BACKWARD}:
            raise ValueError(f"schedule {schedule.name} splits backwards; this engine fuses them")
        self._trains = ActionKind.BACKWARD in kinds
        self._num_micro_batches = schedule.num_micro_batches
        shape = (self._num_micro_batches, *boundary)
        like = next(chunk.parameters())
        self._forward_buffers = None if mesh.is_first_stage else like.new_empty(shape)
        receives_back = self._trains and not mesh.is_last_stage
        self._backward_buffers = like.new_empty(shape) if receives_back else None
        wide = torch.float64 if like.dtype is torch.float64 else torch.float32
        self._zero_loss = torch.zeros((), dtype=wide, device=like.device)

    def run(self, micro_batches: Sequence[MicroBatch], loss_scale: float) -> Tensor:
        """Run the schedule; gradients add up in the parameters.

        Returns the sum of the micro-batches' losses times `loss_scale` on the
        last stage, zero elsewhere.
        """
        step = _Step(micro_batches=micro_batches, loss=self._zero_loss.clone())
        self._post_receives(step)
        for action in self._actions:
            index = action.micro_batch
            if action.kind is ActionKind.FORWARD:
                if self._hooks is not None:
                    self._hooks.before_forward(0, index)
                self._forward(step, action, loss_scale)
                if self._hooks is not None:
                    self._hooks.after_forward(0, index)
            else:
                if self._hooks is not None:
                    self._hooks.before_backward(0, index)
                self._backward(step, action)
                if self._hooks is not None:
                    self._hooks.after_backward(0, index, last=action == self._actions[-1])
        for comm, work, _ in step.sends:
            comm.wait([work], Op.SEND)
        return step.loss

    def _post_receives(self, step: _Step) -> None:
        mesh = self._mesh
        if self._forward_buffers is not None:
            step.forwards = _Inbox(mesh.pp, self._forward_buffers)
            self._post(step.forwards, mesh.at.pp - 1, forward=True)
        if self._backward_buffers is not None:
            step.backwards = _Inbox(mesh.pp_back, self._backward_buffers)
            self._post(step.backwards, mesh.at.pp + 1, forward=False)

    def _post(self, inbox: _Inbox, peer: int, *, forward: bool) -> None:
        for index in range(self._num_micro_batches):
            tag = _tag(index, forward=forward)
            inbox.works[index] = inbox.comm.post_recv(inbox.buffers[index], peer, tag)

    def _forward(self, step: _Step, action: Action, loss_scale: float) -> None:
        index = action.micro_batch
        batch = step.micro_batches[index]
        hidden = None
        if step.forwards is not None:
            hidden = step.forwards.take(index).detach().requires_grad_(self._trains)
            step.inputs[index] = hidden
        with torch.set_grad_enabled(self._trains):
            output = self._chunk(batch.tokens, hidden, batch.targets)
            if self._mesh.is_last_stage:
                output = output * loss_scale
        if self._mesh.is_last_stage:
            step.loss += output.detach()
        else:
            self._send(step, output.detach(), index, forward=True)
        if self._trains:
            step.outputs[index] = output

    def _backward(self, step: _Step, action: Action) -> None:
        index = action.micro_batch
        output = step.outputs.pop(index)
        grad = None if step.backwards is None else step.backwards.take(index)
        torch.autograd.backward(output, grad)
        if step.forwards is not None:
            hidden_grad = step.inputs.pop(index).grad
            assert hidden_grad is not None, "a stage's loss depends on its input"
            self._send(step, hidden_grad, index, forward=False)

    def _send(self, step: _Step, tensor: Tensor, index: int, *, forward: bool) -> None:
        mesh = self._mesh
        comm = mesh.pp if forward else mesh.pp_back
        peer = mesh.at.pp + (1 if forward else -1)
        message = tensor.contiguous()
        work = comm.post_send(message, peer, _tag(index, forward=forward))
        step.sends.append((comm, work, message))


def _tag(micro_batch: int, *, forward: bool) -> int:
    return FIRST_FREE_TAG + 2 * micro_batch + (0 if forward else 1)
