"""The same model and layout with what PyTorch ships: DTensor, torch pipelining, FSDP2.

One GPT under stock parallelism: tensor and sequence parallel through DTensor plans
with loss parallel, pipelines through `torch.distributed.pipelining`, replicas through
`fully_shard` (ZeRO 2 or 3) or DistributedDataParallel (ZeRO 0).
"""

# B batch, S sequence, D model width. Capitals are logical sizes.
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from bench.trainer.shape import Shape

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.hidden // shape.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        query, key, value = (
            linear(x_BSD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden)
        self.attention = _Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.hidden)
        self.up = nn.Linear(shape.hidden, 4 * shape.hidden, bias=False)
        self.down = nn.Linear(4 * shape.hidden, shape.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        out: Tensor = x_BSD + self.down(F.gelu(self.up(self.mlp_norm(x_BSD))))
        return out


class _Gpt(nn.Module):
    """The whole model, or one pipeline stage of it: what a stage lacks is None."""

    def __init__(self, shape: Shape, stage: int, num_stages: int) -> None:
        super().__init__()
        is_first, is_last = stage == 0, stage == num_stages - 1
        per_stage = shape.layers // num_stages
        layers = range(stage * per_stage, (stage + 1) * per_stage)
        self.tokens = nn.Embedding(shape.vocab_size, shape.hidden) if is_first else None
        self.positions = nn.Embedding(shape.seq_len, shape.hidden) if is_first else None
        self.layers = nn.ModuleDict({str(layer): _Block(shape) for layer in layers})
        self.norm = nn.LayerNorm(shape.hidden) if is_last else None
        self.head = nn.Linear(shape.hidden, shape.vocab_size, bias=False) if is_last else None
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.layers.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class Native:
    """One rank of the baseline; `step` trains on one global batch."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self._shape = shape
        mesh = init_device_mesh(
            "cpu", (shape.pp, shape.dp, shape.tp), mesh_dim_names=("pp", "dp", "tp")
        )
        self._mesh = mesh
        self._replica = mesh["dp"].get_local_rank()
        self._schedule: Any = None
        self._loss_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        if shape.pp > 1:
            self._modules = self._pipeline(mesh)
        else:
            self._modules = [self._whole(mesh)]
        parameters = [p for module in self._modules for p in module.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)

    def step(self, number: int) -> None:
        """Forward, backward and update on batch `number`."""
        tokens, targets = self._batch(number)
        if self._schedule is not None:
            self._run_pipeline(tokens, targets)
        else:
            self._run_whole(tokens, targets)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _batch(self, number: int) -> tuple[Tensor, Tensor]:
        shape = self._shape
        generator = torch.Generator().manual_seed(number)
        size = (shape.batch, shape.seq_len + 1)
        block = torch.randint(0, min(256, shape.vocab_size), size, generator=generator)
        own = block.chunk(shape.dp)[self._replica]
        return own[:, :-1].contiguous(), own[:, 1:].contiguous()

    def _whole(self, mesh: DeviceMesh) -> nn.Module:
        shape = self._shape
        model: nn.Module = _Gpt(shape, 0, 1)
        if shape.tp > 1:
            _tensor_parallel(model, mesh["tp"], splits_loss=True)
            self._loss_context = loss_parallel
        if shape.dp > 1:
            model = self._replicated(model, mesh)
        return model

    def _replicated(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if self._shape.zero == 0 and self._shape.tp == 1 and self._shape.pp == 1:
            return DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        # With pipelines, torch's own advice is to keep parameters between micro-batches.
        reshards = self._shape.zero == 3 and self._shape.pp == 1
        for block in model.layers.values():  # type: ignore[operator]
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshards)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
        return model

    def _pipeline(self, mesh: DeviceMesh) -> list[nn.Module]:
        shape = self._shape
        num_stages = shape.pp * shape.virtual_stages
        own = [
            chunk * shape.pp + mesh["pp"].get_local_rank() for chunk in range(shape.virtual_stages)
        ]
        modules: list[nn.Module] = []
        for stage in own:
            module: nn.Module = _Gpt(shape, stage, num_stages)
            if shape.tp > 1:
                _tensor_parallel(module, mesh["tp"], splits_loss=False)
            if shape.dp > 1:
                module = self._replicated(module, mesh)
            modules.append(module)
        group = mesh["pp"].get_group()
        stages = [
            pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"), group=group)
            for module, stage in zip(modules, own, strict=True)
        ]
        kind: Any = SCHEDULES[shape.schedule]
        given = stages[0] if shape.virtual_stages == 1 else stages
        self._schedule = kind(given, shape.micro_batches, loss_fn=_cross_entropy)
        self._is_first, self._is_last = 0 in own, num_stages - 1 in own
        return modules

    def _run_whole(self, tokens: Tensor, targets: Tensor) -> None:
        (model,) = self._modules
        with self._loss_context():
            for part, target in zip(
                tokens.chunk(self._shape.micro_batches),
                targets.chunk(self._shape.micro_batches),
                strict=True,
            ):
                loss = _cross_entropy(model(part), target) / self._shape.micro_batches
                loss.backward()

    def _run_pipeline(self, tokens: Tensor, targets: Tensor) -> None:
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if self._is_last else {}
        self._schedule.step(*((tokens,) if self._is_first else ()), **given)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, splits_loss: bool) -> None:
    """torch's own plan for a GPT with sequence parallelism: one gather for q, k and v."""
    if model.tokens is not None:
        split = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(model, mesh, {"tokens": split, "positions": _SplitPositions()})
    for block in model.layers.values():  # type: ignore[operator]
        gathered = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "attention": gathered,
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    if model.head is not None:
        head = ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if splits_loss else Replicate(),
            use_local_output=not splits_loss,
        )
        parallelize_module(model, mesh, {"norm": SequenceParallel(), "head": head})


class _SplitPositions(ParallelStyle):
    """A replicated position table whose output is split over the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False),)

        def give(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(placements=[Shard(0)]).to_local()

        return distribute_module(module, device_mesh, None, take, give)


def start(store: Any, rank: int, world_size: int) -> None:
    """Join torch's world group."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
