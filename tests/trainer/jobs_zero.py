"""What ranks do in the tests of data parallelism and optimizers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from outlast.layout import Layout, folds
from outlast.sizing.partition import stage_parts
from tests.trainer.jobs import Case, _random_batch, mesh_of
from tests.trainer.ranks import RankContext
from trainer.core import schedule as schedules
from trainer.core.batch import BatchPlan
from trainer.core.rectangles import boxes
from trainer.model.config import GptConfig
from trainer.model.facts import ParameterFacts
from trainer.model.gpt import GptChunk, chunks_of
from trainer.model.parameters import FlatParameters, Sharding
from trainer.optim.adam import AdamWConfig
from trainer.optim.adamw import FlatAdamW
from trainer.optim.clip import clip_gradients, squared_norm_share
from trainer.optim.lamb import FlatLamb, LambConfig
from trainer.optim.norms import sum_in_order
from trainer.parallel.mesh import Mesh
from trainer.parallel.pipeline import PipelineEngine
from trainer.parallel.zero import DataParallel, ZeroConfig

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}
ADAM = AdamWConfig(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroCase:
    """How replicas share, and what they train with."""

    level: int = 0
    reshard: str = "step"
    reduce: str = "step"
    dtype: str = "fp32"
    wire: str | None = None
    optimizer: str = "adamw"
    layers: int = 4
    hidden: int = 16
    recompute: str = "none"
    block: str = "serial"
    virtual_stages: int = 1

    def schedule(self, given: str) -> str:
        """With several chunks the given one may have no more than one."""
        return "interleaved" if self.virtual_stages > 1 and not folds(given) else given


def model(case: ZeroCase, layout_case: Case, mesh: Mesh) -> tuple[list[GptChunk], FlatParameters]:
    config = GptConfig(
        layers=case.layers,
        hidden=case.hidden,
        heads=4,
        mlp_hidden=3 * case.hidden,
        vocab_size=32,
        seq_len=layout_case.seq_len,
        tied_embeddings=layout_case.tied,
        norm_eps=1e-5,
        init_std=0.3,
        sequence_parallel=layout_case.sequence_parallel,
        dtype=DTYPES[case.dtype],
        recompute=case.recompute,
        block=case.block,
    )
    parts = stage_parts(
        case.layers,
        stage=mesh.at.pp,
        num_stages=mesh.layout.pp,
        num_chunks=case.virtual_stages,
        folds=mesh.folds,
    )
    chunks = chunks_of(config, mesh, parts)
    sharding = Sharding(level=case.level, index=mesh.dp.index, count=mesh.dp.size)
    flat = FlatParameters(chunks, tp_size=mesh.tp.size, sharding=sharding)
    flat.initialise(7)
    return chunks, flat


def optimizer_of(name: str, flat: FlatParameters, mesh: Mesh) -> FlatAdamW | FlatLamb:
    if name == "adamw":
        return FlatAdamW(flat, ADAM)
    return FlatLamb(flat, LambConfig(adam=ADAM, phi_min=0.0, phi_max=10.0), mesh)


def shards_of(
    flat: FlatParameters, of: Literal["master", "grads"] = "master"
) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Any]]:
    """Name, global shape, offsets and values of every rectangle that this rank updates."""
    found = []
    for part in flat.parts:
        for piece in part.pieces:
            facts = flat.facts[piece.name]
            values = (part.master if of == "master" else part.grads)[piece.at]
            for box in boxes(facts.shape, piece.inside.start, piece.inside.stop):
                start = box.start - piece.inside.start
                stop = start + torch.Size(box.shape).numel()
                offsets = tuple(a + b for a, b in zip(facts.offsets, box.offsets, strict=True))
                array = values[start:stop].view(box.shape).numpy().copy()
                found.append((facts.stored, facts.global_shape, offsets, array))
    return found


def train_cases(
    context: RankContext, layout_case: Case, cases: tuple[ZeroCase, ...], steps: int
) -> list[dict[str, Any]]:
    """Train the same model once for each case; losses, norms and the rank's weights."""
    mesh = mesh_of(
        context,
        layout_case.layout,
        tied=layout_case.tied,
        folds=folds(layout_case.schedule),
    )
    return [_train(mesh, layout_case, case, steps) for case in cases]


def _train(mesh: Mesh, layout_case: Case, case: ZeroCase, steps: int) -> dict[str, Any]:
    chunks, flat = model(case, layout_case, mesh)
    split = layout_case.sequence_parallel and mesh.tp.size > 1
    config = ZeroConfig(
        reshard_each_micro_batch=case.reshard == "micro_batch",
        reduce_each_micro_batch=case.reduce == "micro_batch",
        wire=None if case.wire is None else DTYPES[case.wire],
    )
    replicas = DataParallel(flat, chunks, mesh, config, sequence_parallel=split)
    replicas.refresh()
    optimizer = optimizer_of(case.optimizer, flat, mesh)
    plan = BatchPlan(
        num_samples=64,
        global_batch=layout_case.global_batch,
        micro_batch=layout_case.micro_batch,
        num_replicas=layout_case.layout.dp,
        seed=3,
    )
    schedule = schedules.build(
        case.schedule(layout_case.schedule),
        layout_case.layout.pp,
        plan.num_micro_batches,
        num_chunks=case.virtual_stages,
    )
    seq_len = layout_case.seq_len
    boundary = (seq_len // mesh.tp.size if split else seq_len, layout_case.micro_batch, case.hidden)
    engine = PipelineEngine(
        chunks,
        mesh,
        schedule,
        boundary=boundary,
        hooks=replicas,
        replicated=mesh.tp.size > 1 and not split,
    )
    tokens = layout_case.global_batch * seq_len
    curve, sent = [], 0
    for step in range(1, steps + 1):
        before = mesh.dp.bytes_sent
        replicas.prefetch()
        batches = [
            _random_batch(plan.samples(step, mesh.at.dp, index), seq_len)
            for index in range(plan.num_micro_batches)
        ]
        replicas.begin_step(len(batches))
        loss = engine.run(batches, 1.0 / tokens)
        replicas.finish_gradients()
        sent = mesh.dp.bytes_sent - before
        share = loss.double() if mesh.at.tp == 0 else torch.zeros_like(loss).double()
        row = torch.stack((share, squared_norm_share(flat, mesh)))
        total, squared = mesh.fold(row, sum_in_order).tolist()
        clip_gradients(flat, squared**0.5, 1.0)
        before = mesh.dp.bytes_sent
        optimizer.step(step, 0.01, updated=replicas.updated)
        sent += mesh.dp.bytes_sent - before
        curve.append((total, squared**0.5))
    replicas.drain()
    return {
        "curve": curve,
        "shards": shards_of(flat),
        "bytes": sent,
        "elements": [part.all_values.numel() for part in flat.parts],
        "blocks": [part.all_values.numel() for part in flat.parts if part.bucket.is_block],
        "most_gathered": replicas.weights.most_gathered,
    }


def optimizer_steps(
    context: RankContext, layout_case: Case, case: ZeroCase, steps: int, phi_max: float | None
) -> Any:
    """LAMB on gradients made from name and step; the rank's weights after each step."""
    mesh = mesh_of(
        context,
        layout_case.layout,
        tied=layout_case.tied,
        folds=folds(layout_case.schedule),
    )
    _, flat = model(case, layout_case, mesh)
    lamb = FlatLamb(flat, LambConfig(adam=ADAM, phi_min=0.0, phi_max=phi_max), mesh)
    after = []
    for step in range(1, steps + 1):
        for part in flat.parts:
            for piece in part.pieces:
                made = gradient_like(flat.facts[piece.name], piece.name, step)
                part.grads[piece.at].copy_(made.reshape(-1)[piece.inside])
        lamb.step(step, 0.02)
        after.append(shards_of(flat))
    return after


def gradient_like(facts: ParameterFacts, name: str, step: int) -> torch.Tensor:
    """A gradient that every layout makes alike: values that another name would start with."""
    made = replace(facts, init="normal", std=0.5 + 0.1 * step)
    return made.initial(step, f"gradient {name}")


def whole_model(
    case: ZeroCase, *, phi_min: float, phi_max: float | None
) -> tuple[FlatParameters, FlatLamb]:
    """The dense model and its LAMB, in this process."""
    context = RankContext(rank=0, world_size=1, port=0, listen_fd=-1)
    mesh = mesh_of(context, Layout())
    _, flat = model(case, Case(layout=Layout()), mesh)
    return flat, FlatLamb(flat, LambConfig(adam=ADAM, phi_min=phi_min, phi_max=phi_max), mesh)
