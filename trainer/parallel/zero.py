"""Data parallelism around the uses of model chunks: ZeRO 0 to 3.

0 keeps everything on every replica and sums gradients. 1 shares the optimizer
state: gradients are reduce-scattered, new weights all-gathered. 2 also drops the
whole gradients of a bucket once they are reduced, 3 also its whole weights once
they are used (Rajbhandari et al., arXiv 1910.02054).

Each gather is launched before its bucket is needed: at ZeRO 1 and 2 right after
the optimizer, behind whatever comes before the next forward pass; at ZeRO 3 one
unit (embedding, block, output) ahead of the computation, the first ones behind data
loading; two units where the experts of a block are one of their own. So at ZeRO 3
the whole weights that have memory are those of one block in use, one block on its
way, and the chunk's ends (embedding and output), which stay as long as their chunk
is used. A backward pass needs no weights of an embedding, but those of its norm.

What does not belong here: how messages travel, how buckets lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from trainer.model.buckets import EMBEDDING_NORM
from trainer.model.gpt import GptChunk
from trainer.model.parameters import FlatParameters, Part
from trainer.parallel.gradients import GradientReducer
from trainer.parallel.mesh import Mesh
from trainer.parallel.partial_sums import sum_partial_gradients
from trainer.parallel.weights import WeightGatherer


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroConfig:
    """What is traded for what; the level itself is said to `FlatParameters`.

    `reshard_each_micro_batch` (level 3) drops weights after every use and gathers them
    again for the backward pass, instead of keeping them until the step's last one.
    `reduce_each_micro_batch` (levels 2 and 3) holds no whole gradients between
    micro-batches. `wire` is the type of gradients in messages, None for that of their sums.
    """

    reshard_each_micro_batch: bool
    reduce_each_micro_batch: bool
    wire: torch.dtype | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """The buckets of a chunk, in the order in which a forward pass needs them."""

    embedding: tuple[Part, ...]
    blocks: tuple[Part, ...]
    output: tuple[Part, ...]

    @classmethod
    def of(cls, parts: Sequence[Part], chunk: int, module: GptChunk) -> _Units:
        own = [part for part in parts if part.bucket.chunk == chunk]
        names = {name for name, _ in module.named_parameters()}
        shared = [
            part
            for part in parts
            if part.bucket.chunk != chunk and not names.isdisjoint(part.bucket.slices)
        ]
        blocks = tuple(part for part in own if part.bucket.is_block)
        ends = [part for part in own if not part.bucket.is_block]
        embeds = {"embedding", EMBEDDING_NORM} | ({"tied"} if module.part.is_first else set())
        return cls(
            embedding=tuple(part for part in ends if part.bucket.unit in embeds),
            blocks=blocks,
            output=(*shared, *(part for part in ends if part.bucket.unit not in embeds)),
        )

    @property
    def all(self) -> tuple[Part, ...]:
        return (*self.embedding, *self.blocks, *self.output)

    @property
    def first(self) -> tuple[Part, ...]:
        """What a forward pass needs first, and what it looks ahead to."""
        return (*self.embedding, *(self.blocks[:1] or self.output))

    @property
    def last(self) -> tuple[Part, ...]:
        """What a backward pass needs first, and the norm of embeddings, which is small."""
        return (*self.output, *self.blocks[-1:], *self.norm)

    @property
    def norm(self) -> tuple[Part, ...]:
        """The norm of the embeddings."""
        return tuple(part for part in self.embedding if part.bucket.unit == EMBEDDING_NORM)


class DataParallel:
    """Keeps replicas equal; the pipeline engine calls it around each use of a chunk."""

    def __init__(
        self,
        flat: FlatParameters,
        chunks: Sequence[GptChunk],
        mesh: Mesh,
        config: ZeroConfig,
        *,
        sequence_parallel: bool,
    ) -> None:
        self._flat = flat
        self._mesh = mesh
        self._sequence_parallel = sequence_parallel
        self._reshards = config.reshard_each_micro_batch
        # A block and its experts, where these are apart.
        self._ahead = 1 if mesh.ep.size == 1 else 2
        self._is_backward = False
        self._backwards_left: dict[int, int] = {}
        self.weights = WeightGatherer(flat, mesh.dp, mesh.expert_dp)
        self._gradients = GradientReducer(
            flat,
            mesh.dp,
            mesh.expert_dp,
            each_micro_batch=config.reduce_each_micro_batch and flat.level >= 2,
            wire=config.wire,
            done=self._weights_used,
        )
        self._hooks: list[RemovableHandle] = []
        self._units = [_Units.of(flat.parts, chunk, module) for chunk, module in enumerate(chunks)]
        if flat.level:
            for chunk, module in enumerate(chunks):
                self._watch(chunk, module)

    def detach(self) -> None:
        """Let the chunks and their parameters be; another one may take them over."""
        self._gradients.detach()
        for hook in self._hooks:
            hook.remove()

    def prefetch(self) -> None:
        """Launch what the next forward pass needs first."""
        self._start(self._flat.parts if self._flat.level < 3 else self._units[0].first)

    def observe(self, observer: Callable[[Tensor], None] | None) -> None:
        """Show every flat gradient to `observer` right before it meets those of other replicas."""
        self._gradients.observe(observer)

    def begin_step(self, num_micro_batches: int) -> None:
        """Backward passes of a new step follow, so many through each chunk."""
        self._backwards_left = dict.fromkeys(range(len(self._units)), num_micro_batches)
        self._gradients.begin_step()

    def before_forward(self, chunk: int, micro_batch: int) -> None:
        self._is_backward = False
        self._start(self._units[chunk].first)
        self._ensure(self._units[chunk].embedding)

    def after_forward(self, chunk: int, micro_batch: int) -> None:
        if self._reshards:
            self._release(chunk)
        elif chunk + 1 < len(self._units):
            self._start(self._units[chunk + 1].first)

    def before_backward(self, chunk: int, micro_batch: int) -> None:
        self._is_backward = True
        self._start(self._units[chunk].last)
        self._ensure((*self._units[chunk].output, *self._units[chunk].norm))
        self._backwards_left[chunk] -= 1
        self._gradients.begin_backward(chunk, last=self._backwards_left[chunk] == 0)

    def after_backward(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        self._gradients.end_backward()
        if self._reshards or last:
            self._release(chunk)

    def after_inputs(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        self._gradients.pause_backward(chunk, micro_batch)
        if self._reshards or last:
            self._release(chunk)

    def before_weights(self, chunk: int, micro_batch: int) -> None:
        self._gradients.resume_backward(chunk, micro_batch)

    def after_weights(self, chunk: int, micro_batch: int) -> None:
        self._gradients.end_backward()

    def finish_gradients(self) -> None:
        """Return once the own parts hold the gradients of the global batch."""
        self._gradients.finish()
        sum_partial_gradients(self._flat, self._mesh, sequence_parallel=self._sequence_parallel)

    def updated(self, part: Part) -> None:
        """The optimizer, or a checkpoint, has given the own part new weights."""
        self.weights.updated(part)

    def refresh(self) -> None:
        """All own parts have new weights."""
        for part in self._flat.parts:
            self.weights.updated(part)

    def drain(self) -> None:
        """Return once nothing is under way any more."""
        for part in self._flat.parts:
            if self._flat.level < 3:
                self.weights.ensure(part)
            else:
                self.weights.release(part)

    def _watch(self, chunk: int, module: GptChunk) -> None:
        units = self._units[chunk]
        for position, part in enumerate(units.blocks):
            block = module.get_submodule(part.bucket.unit)
            enter, leave = (
                partial(each, part, position) for each in (self._enter_block, self._leave_block)
            )
            self._hooks.append(block.register_forward_pre_hook(enter))
            self._hooks.append(block.register_forward_hook(leave))
        if units.output:
            # The norm before the output layer is the first that needs its bucket.
            ensure = partial(self._ensure_output, units.output)
            self._hooks.append(module.norm.register_forward_pre_hook(ensure))

    def _start(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self.weights.start(part)

    def _ensure(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self.weights.ensure(part)

    def _ensure_output(self, parts: Sequence[Part], *_: Any) -> None:
        self._ensure(parts)

    def _release(self, chunk: int) -> None:
        for part in self._units[chunk].all:
            self.weights.release(part)

    def _enter_block(self, part: Part, position: int, *_: Any) -> None:
        """A block is about to compute, forwards, backwards or once more for backwards."""
        self.weights.ensure(part)
        units = self._units[part.bucket.chunk]
        if self._is_backward:
            self._start(units.blocks[max(0, position - self._ahead) : position])
        elif position + 1 < len(units.blocks):
            self._start(units.blocks[position + 1 : position + 1 + self._ahead])
        else:
            self._start(units.output)

    def _leave_block(
        self,
        part: Part,
        position: int,
        module: object,
        inputs: object,
        outputs: Tensor | tuple[Tensor, ...],
    ) -> None:
        # What else a block gives is needed by its end alone, where all of it is needed.
        stream = outputs if isinstance(outputs, Tensor) else outputs[0]
        if stream.requires_grad:
            # torch's stubs leave this method untyped.
            stream.register_hook(partial(self._enter_block, part, position))  # type: ignore[no-untyped-call]
        if self._reshards and not self._is_backward:
            self.weights.release(part)

    def _weights_used(self, part: Part) -> None:
        if self._reshards and part.bucket.is_block:
            self.weights.release(part)
