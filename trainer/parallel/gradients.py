"""Gradients on their way: from autograd into buckets, and from there to the replicas.

A bucket is reduced as soon as the backward pass has its last gradient, while the
pass goes on with the bucket before it. Launches follow one fixed order, last
bucket first, whatever order gradients come in: replicas that launched in
different orders would wait for each other for ever. At most two reductions are
under way, which bounds the memory of buckets that are there only for them.

What does not belong here: sums over other groups than the replicas
(`partial_sums.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.model.parameters import (
    FlatParameters,
    Part,
    drop_memory,
    has_memory,
    restore_memory,
)
from trainer.parallel.comm import Comm, Pending, PendingReduce

# One is on the wire while the next is being filled; the third would only hold memory.
_MAX_UNDER_WAY = 2


class _ScatterThenGather:
    """A sum over the group that travels in a type of its own, both ways."""

    def __init__(self, comm: Comm, flat: Tensor, wire: torch.dtype) -> None:
        self._comm = comm
        self._flat = flat
        self._own = flat.view(comm.size, -1)[comm.index]
        self._wire = wire
        self._rounded: Tensor | None = None
        self._pending = comm.start_reduce_scatter(flat, self._own, wire_dtype=wire)

    def advance(self) -> None:
        """Wait for the own sums and start to gather all."""
        if self._rounded is None:
            self._pending.wait()
            own = self._own.to(self._wire)
            self._rounded = own.new_empty(self._flat.numel())
            self._pending = self._comm.start_all_gather(own, self._rounded)

    def wait(self) -> None:
        self.advance()
        assert self._rounded is not None, "just started"
        self._pending.wait()
        # The owner takes its rounded sum too, or replicas would drift apart.
        self._flat.copy_(self._rounded)


class _Scatter:
    """A sum of which each member keeps its shard: there is no second half."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def advance(self) -> None:
        """Nothing to advance."""

    def wait(self) -> None:
        self._pending.wait()


@dataclass(slots=True)
class _Reduction:
    part: Part
    pending: PendingReduce


@dataclass(slots=True, kw_only=True)
class _Pass:
    """A backward pass through a chunk: what is to come of each bucket, and the order to launch."""

    chunk: int = 0
    reduces: bool = False
    missing: dict[Part, int] = field(default_factory=dict)
    queue: deque[Part] = field(default_factory=deque)


class GradientReducer:
    """Collects the gradients of every backward pass and sums them over the replicas.

    `expert_dp` are the replicas that hold the same experts. `each_micro_batch` reduces after
    each backward pass instead of the step's last one; `wire` is the type of gradients on the
    wire, None for that of their sums. `done` is called when a backward pass needs the weights
    of a bucket no more.
    """

    def __init__(
        self,
        flat: FlatParameters,
        dp: Comm,
        expert_dp: Comm,
        *,
        each_micro_batch: bool,
        wire: torch.dtype | None,
        done: Callable[[Part], None],
    ) -> None:
        self._flat = flat
        self._dp = dp
        self._expert_dp = expert_dp
        self._each_micro_batch = each_micro_batch
        self._wire = wire
        self._done = done
        self._pass = _Pass()
        self._paused: dict[tuple[int, int], _Pass] = {}
        self._under_way: deque[_Reduction] = deque()
        self._reduced: set[Part] = set()
        self._observer: Callable[[Tensor], None] | None = None
        self._hooks: list[Any] = []
        if dp.size > 1 or flat.moves_grads:
            for part in flat.parts:
                for name in part.bucket.slices:
                    hook = partial(self._accumulated, part, name)
                    parameter: Any = flat.parameters[name]
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Hear no more of gradients."""
        for hook in self._hooks:
            hook.remove()

    def observe(self, observer: Callable[[Tensor], None] | None) -> None:
        """Show every flat gradient to `observer` right before it is reduced."""
        self._observer = observer

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._flat.grads.zero_()
        self._reduced.clear()

    def begin_backward(self, chunk: int, *, last: bool) -> None:
        """A backward pass through a chunk begins; `last` of this step."""
        parts = [part for part in self._flat.parts if part.bucket.chunk == chunk]
        self._pass = _Pass(
            chunk=chunk,
            reduces=self._dp.size > 1 and (last or self._each_micro_batch),
            missing={part: len(part.bucket.slices) for part in parts},
            queue=deque(reversed(parts)),
        )

    def pause_backward(self, chunk: int, micro_batch: int) -> None:
        """The pass has gradients still to come, once it is resumed."""
        self._paused[chunk, micro_batch] = self._pass

    def resume_backward(self, chunk: int, micro_batch: int) -> None:
        """A pass that was paused goes on."""
        self._pass = self._paused.pop((chunk, micro_batch))

    def end_backward(self) -> None:
        """Launch what no last gradient has launched."""
        self._pass.missing.clear()
        self._launch_ready()

    def finish(self) -> None:
        """Wait until all sums are there."""
        while self._under_way:
            self._finish_oldest()

    def _accumulated(self, part: Part, name: str, parameter: Tensor) -> None:
        if self._flat.moves_grads:
            self._take(part, name, parameter)
        if part.bucket.chunk != self._pass.chunk:
            # Of a table that both ends of the model share; the other end's gradient comes later.
            return
        missing = self._pass.missing
        missing[part] -= 1
        if missing[part] == 0:
            del missing[part]
            self._done(part)
            self._launch_ready()

    def _take(self, part: Part, name: str, parameter: Tensor) -> None:
        """Move a gradient from where autograd left it into the bucket's sums."""
        self._be_there(part)
        grad = parameter.grad
        assert grad is not None, "autograd has just accumulated it"
        part.all_grads[part.bucket.slices[name]].view(grad.shape).add_(grad)
        parameter.grad = None

    def _be_there(self, part: Part) -> None:
        """Give the sums of a bucket memory, unless they have it."""
        while any(reduction.part is part for reduction in self._under_way):
            self._finish_oldest()
        if not has_memory(part.all_grads):
            restore_memory(part.all_grads)
            part.all_grads.zero_()

    def _launch_ready(self) -> None:
        now = self._pass
        while now.reduces and now.queue and now.queue[0] not in now.missing:
            part = now.queue.popleft()
            self._be_there(part)
            if self._observer is not None:
                self._observer(part.all_grads)
            for reduction in self._under_way:
                reduction.pending.advance()
            self._under_way.append(_Reduction(part, self._start(part)))
            if len(self._under_way) > _MAX_UNDER_WAY:
                self._finish_oldest()

    def _start(self, part: Part) -> PendingReduce:
        dp = self._expert_dp if part.bucket.divided else self._dp
        if self._flat.level == 0:
            if self._wire is None:
                return dp.start_all_reduce(part.all_grads)
            return _ScatterThenGather(dp, part.all_grads, self._wire)
        own = part.all_grads[part.owned]
        pending = dp.start_reduce_scatter(part.all_grads, own, wire_dtype=self._wire)
        return _Scatter(pending)

    def _finish_oldest(self) -> None:
        reduction = self._under_way.popleft()
        reduction.pending.wait()
        part = reduction.part
        if self._flat.level < 2:
            return
        if part in self._reduced:
            part.grads.add_(part.all_grads[part.owned])
        else:
            part.grads.copy_(part.all_grads[part.owned])
            self._reduced.add(part)
        drop_memory(part.all_grads)
