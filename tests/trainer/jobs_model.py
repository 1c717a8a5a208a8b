"""What ranks do in the tests of the model, each function on every rank."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outlast.layout import Layout
from outlast.sizing.partition import stage_parts
from outlast.spec import JobSpec
from tests.trainer.jobs import mesh_of, own_part
from tests.trainer.jobs_zero import shards_of
from tests.trainer.oracles import MICRO_BATCH, MODELS
from tests.trainer.ranks import RankContext
from trainer.core import schedule as schedules
from trainer.model.carried import carried_rows
from trainer.model.config import GptConfig
from trainer.model.dropout import DropoutKey
from trainer.model.gpt import GptChunk
from trainer.model.layers import tensor_parallel
from trainer.model.parameters import FlatParameters
from trainer.model.parts import places_of
from trainer.parallel.mesh import Mesh
from trainer.parallel.pipeline import MicroBatch, PipelineEngine, Sentences
from trainer.parallel.tensor import TensorParallel, column_linear
from trainer.parallel.vocab import vocab_loss
from trainer.parallel.zero import DataParallel
from trainer.worker.body import sharding_of
from trainer.worker.configure import gpt_config, zero_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A layout to run the oracles' models on."""

    layout: Layout
    sequence_parallel: bool = True
    virtual_stages: int = 1
    zero: int = 0
    context: str = "all_to_all"
    precision: str = "fp64"
    document_mask: bool = False
    reset_positions: bool | None = None


def oracle_models(
    context: RankContext, run: Run, folder: str, names: tuple[str, ...] = tuple(MODELS)
) -> dict[str, Any]:
    """The oracles' logits, loss and gradients as this rank's shards."""
    # Models without tied embeddings have nothing to exchange in the group for them.
    mesh = mesh_of(context, run.layout, tied=True)
    return {name: _oracle_model(mesh, run, name, folder) for name in names}


def _oracle_model(mesh: Mesh, run: Run, name: str, folder: str) -> dict[str, Any]:
    with np.load(Path(folder) / f"{name}.npz") as file:
        # What is to be found is the test's business.
        given = [key for key in file.files if not key.startswith(("gradients/", "logits", "loss"))]
        arrays = {key: file[key] for key in given}
    section = MODELS.get(name) or json.loads(str(arrays["section"]))
    spec = _spec(section, run)
    # Messages of any size are cut, so that tiny models overlap like large ones.
    config = replace(gpt_config(spec), tp_min_piece_bytes=1)
    parts = stage_parts(
        config.layers,
        stage=mesh.at.pp,
        num_stages=mesh.layout.pp,
        num_chunks=run.virtual_stages,
    )
    chunks = [GptChunk(config, mesh, part) for part in parts]
    sharding = sharding_of(mesh, run.zero)
    flat = FlatParameters(chunks, tp_size=mesh.tp.size, sharding=sharding)
    tp = tensor_parallel(config, mesh)
    replicas = DataParallel(
        flat, chunks, mesh, zero_config(spec), sequence_parallel=tp.sequence_parallel
    )
    _load(flat, {key: arrays[f"weights/{key}"] for key in stored(flat)})
    replicas.refresh()
    logits = _kept_logits(chunks[-1], tp, config)
    in_ring = config.context == "ring"
    batches = _batches(mesh, arrays, ordered=config.sentence_order, in_ring=in_ring)
    scale: float | Tensor = 1.0 / arrays["targets"].size
    if config.sentence_order:
        scale = torch.tensor([scale, 1.0 / len(arrays["targets"])], dtype=torch.float64)
    loss = _engine(run, mesh, chunks, config, len(batches), replicas).run(
        _begun(replicas, batches), scale
    )
    replicas.finish_gradients()
    replicas.drain()
    share = loss if mesh.at.tp == 0 else torch.zeros_like(loss)
    return {
        "loss": mesh.fold(share.view(1), lambda rows: rows.sum(dim=0)).item(),
        "place": (mesh.replica, mesh.cp.index, mesh.at.tp),
        "tokens": places_of(config, mesh.cp, mesh.device).tolist(),
        "logits": torch.cat(logits, dim=1).numpy() if logits else None,
        "gradients": shards_of(flat, "grads"),
    }


def _begun(replicas: DataParallel, batches: list[MicroBatch]) -> list[MicroBatch]:
    replicas.prefetch()
    replicas.begin_step(len(batches))
    return batches


def _engine(
    run: Run,
    mesh: Mesh,
    chunks: list[GptChunk],
    config: GptConfig,
    num_micro_batches: int,
    hooks: DataParallel,
) -> PipelineEngine:
    split = run.sequence_parallel and mesh.tp.size > 1
    schedule = schedules.build(
        "interleaved" if run.virtual_stages > 1 else "1f1b",
        mesh.layout.pp,
        num_micro_batches,
        num_chunks=run.virtual_stages,
    )
    local_seq = config.seq_len // (mesh.cp.size * (mesh.tp.size if split else 1))
    local_seq += carried_rows(config, MICRO_BATCH, mesh.tp.size)
    return PipelineEngine(
        chunks,
        mesh,
        schedule,
        boundary=(local_seq, MICRO_BATCH, config.hidden),
        replicated=mesh.tp.size > 1 and not split,
        hooks=hooks,
    )


def _kept_logits(chunk: GptChunk, tp: TensorParallel, config: GptConfig) -> list[Tensor]:
    """The logits of each micro-batch, once the chunk has run; none if it has no output."""
    logits: list[Tensor] = []
    if chunk.part.is_last:
        table = chunk.tokens if chunk.head is None else chunk.head
        bias = table.bias if chunk.head_bias is None else chunk.head_bias.weight

        def keep_logits(_module: Any, _inputs: Any, normed_SBD: Tensor) -> None:
            found = column_linear(normed_SBD.detach(), table.weight, bias, tp)
            found = found * config.logit_scale
            if (cap := config.logit_softcap) is not None:
                found = cap * torch.tanh(found / cap)
            logits.append(found.detach())

        last = chunk.norm if chunk.head_transform is None else chunk.head_transform
        last.register_forward_hook(keep_logits)
    return logits


def _spec(model: dict[str, Any], run: Run) -> JobSpec:
    # Validated field by field only: the byte tokenizer asks for a larger vocabulary.
    parallel = {
        "tp": run.layout.tp,
        "pp": run.layout.pp,
        "dp": run.layout.num_replicas,
        "cp": run.layout.cp,
        "context": run.context,
        "ep": run.layout.ep,
        "sequence_parallel": run.sequence_parallel,
        "zero": {"level": run.zero},
    }
    return JobSpec.model_validate(
        {
            "name": "oracle",
            "precision": run.precision,
            "model": model,
            "parallel": parallel,
            "data": {"document_mask": run.document_mask, "reset_positions": run.reset_positions},
        }
    )


def stored(flat: FlatParameters) -> set[str]:
    """Names of the tensors that a rank has a part of."""
    return {facts.stored for facts in flat.facts.values()}


def _load(flat: FlatParameters, arrays: dict[str, Any]) -> None:
    for part in flat.parts:
        for piece in part.pieces:
            facts = flat.facts[piece.name]
            full = torch.from_numpy(arrays[facts.stored])
            assert tuple(full.shape) == facts.global_shape, piece.name
            for dim, (offset, size) in enumerate(zip(facts.offsets, facts.shape, strict=True)):
                full = full.narrow(dim, offset, size)
            part.master[piece.at].copy_(full.reshape(-1)[piece.inside])


def _batches(
    mesh: Mesh, arrays: dict[str, Any], *, ordered: bool, in_ring: bool
) -> list[MicroBatch]:
    """This replica's samples, in order, as the rank takes them."""
    per_replica = len(arrays["tokens"]) // mesh.layout.num_replicas
    first = mesh.replica * per_replica

    def part(key: str, start: int) -> Tensor:
        found = torch.from_numpy(arrays[key][start : start + MICRO_BATCH])
        return found.t().contiguous() if found.dim() > 1 else found

    whole = [
        MicroBatch(
            tokens=part("tokens", start),
            targets=part("targets", start),
            starts=part("starts", start) if "starts" in arrays else None,
            sentences=Sentences(segments=part("segments", start), swapped=part("swapped", start))
            if ordered
            else None,
        )
        for start in range(first, first + per_replica, MICRO_BATCH)
    ]
    return [own_part(batch, mesh, in_ring=in_ring) for batch in whole]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCase:
    """How to compute the loss of 12 tokens over a vocabulary of 16."""

    max_logits: int
    biased: bool = False
    logit_scale: float = 1.0
    sequence_parallel: bool = True


def vocab_loss_case(context: RankContext, case: LossCase) -> dict[str, Any]:
    """The loss of this rank's shards and its gradients, beside those of whole logits."""
    mesh = mesh_of(context, Layout(tp=context.world_size))
    split = case.sequence_parallel and context.world_size > 1
    tp = TensorParallel(comm=mesh.tp, sequence_parallel=split)
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((4, 3, 5), (16, 5), (16,))
    )
    targets = torch.randint(0, 16, (4, 3), generator=generator)
    logits = case.logit_scale * F.linear(hidden, weight, bias if case.biased else None)
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    # Not one, so that a gradient that ignores what comes after the loss is found out.
    (3.0 * whole).backward()

    def own(tensor: Tensor, sharded: bool = True) -> Tensor:
        return tensor.chunk(context.world_size)[context.rank] if sharded else tensor

    full = {"hidden": (hidden, split), "weight": (weight, True)}
    full |= {"bias": (bias, True)} if case.biased else {}
    shards = {name: own(*part).detach().clone().requires_grad_() for name, part in full.items()}
    with LargestTensor() as seen:
        loss = vocab_loss(
            shards["hidden"],
            shards["weight"],
            targets,
            tp,
            bias_V=shards.get("bias"),
            logit_scale=case.logit_scale,
            max_logits=case.max_logits,
        )
        (3.0 * loss).backward()
    return {
        "loss": loss.item(),
        "expected_loss": whole.item(),
        "largest": seen.numel,
        "found": {name: shard.grad.numpy() for name, shard in shards.items()},
        "expected": {
            name: own(tensor.grad, sharded).numpy() for name, (tensor, sharded) in full.items()
        },
    }


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler to keep out of its way: a second in every rank.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCase:
    """A model with dropout, on a tensor group of all ranks."""

    sequence_parallel: bool = True
    cp: int = 1
    block: str = "serial"
    recompute: str = "none"
    window: int | None = None
    dropout: float = 0.2
    attention_dropout: float = 0.1


def dropout_run(context: RankContext, case: DropCase) -> dict[str, Any]:
    """Two micro-batches, forward in order and backward in reverse; gradients and masks."""
    tp = context.world_size // case.cp
    mesh = mesh_of(context, Layout(tp=tp, dp=case.cp, cp=case.cp))
    model = _COMMON_DROP | {
        "block": case.block,
        "window": case.window,
        "dropout": case.dropout,
        "attention_dropout": case.attention_dropout,
    }
    parallel = {
        "tp": tp,
        "cp": case.cp,
        "sequence_parallel": case.sequence_parallel,
        "recompute": case.recompute,
    }
    spec = JobSpec.model_validate(
        {"name": "drop", "precision": "fp64", "model": model, "parallel": parallel}
    )
    config = gpt_config(spec)
    (part,) = stage_parts(config.layers, stage=0, num_stages=1)
    chunk = GptChunk(config, mesh, part)
    flat = FlatParameters([chunk], tp_size=mesh.tp.size)
    flat.initialise(7)
    masks: list[tuple[str, int | None, bytes]] = []
    _note_masks(masks)
    whole = torch.arange(32).view(16, 2) % 16
    batch = own_part(MicroBatch(tokens=whole, targets=whole.roll(1, 0)), mesh)
    losses = []
    for micro_batch in (0, 1):
        chunk.begin(3, micro_batch)
        losses.append(chunk(batch.tokens, None, batch.targets))
    in_forward = len(masks)
    for loss in losses:
        loss.backward()
    with torch.no_grad():
        evaluated = [chunk(batch.tokens, None, batch.targets).item() for _ in range(2)]
    return {
        "losses": [loss.item() for loss in losses],
        "evaluated": evaluated,
        "masks": masks[:in_forward],
        "repeated": masks[in_forward:],
        "heavy": [name for name in ("torch._dynamo", "triton") if name in sys.modules],
        "gradients": {name: flat.view(flat.grads, name).numpy().copy() for name in flat.facts},
    }


_COMMON_DROP = {
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "ffn_hidden": 32,
    "vocab_size": 16,
    "seq_len": 16,
    "init_std": 0.3,
}


def _note_masks(masks: list[tuple[str, int | None, bytes]]) -> None:
    """Write down each mask. This process is a child of its own: what is replaced ends with it."""
    draw = DropoutKey.generator

    def noting(
        self: DropoutKey, site: str, shard: int | None, device: torch.device
    ) -> torch.Generator:
        name = f"{self.step}/{self.micro_batch}/{site}"
        sample = torch.rand(8, generator=draw(self, site, shard, device)).numpy().tobytes()
        masks.append((name, shard, sample))
        return draw(self, site, shard, device)

    DropoutKey.generator = noting  # type: ignore[method-assign]
