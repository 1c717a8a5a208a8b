"""The memory of one rank's model and of its optimizer, laid out as the job spec says.

What does not belong here: what moves it, step by step (`trainer.worker.state`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outlast.sizing.partition import stage_parts
from outlast.spec import JobSpec
from trainer.model.config import GptConfig
from trainer.model.gpt import GptChunk, chunks_of
from trainer.model.parameters import FlatParameters, Sharding
from trainer.optim.adamw import FlatAdamW
from trainer.optim.lamb import FlatLamb
from trainer.parallel.mesh import Mesh
from trainer.worker import configure
from trainer.worker.meter import PeakMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The memory of one rank's model and its optimizer, and what computes on it.

    A process that lives on has it through several attempts.
    """

    config: GptConfig
    chunks: Sequence[GptChunk]
    flat: FlatParameters
    optimizer: FlatAdamW | FlatLamb
    memory: PeakMemory


def build_body(spec: JobSpec, mesh: Mesh) -> Body:
    """Build the rank's model and its optimizer; values are not initialised yet."""
    memory = PeakMemory(mesh.device)
    config = configure.gpt_config(spec)
    chunks = build_chunks(spec, config, mesh)
    flat = FlatParameters(
        chunks,
        tp_size=mesh.tp.size,
        sharding=sharding_of(mesh, spec.parallel.zero.level),
    )
    return Body(
        config=config,
        chunks=chunks,
        flat=flat,
        optimizer=configure.optimizer(spec, flat, mesh),
        memory=memory,
    )


def sharding_of(mesh: Mesh, level: int) -> Sharding:
    """What of a rank's parameters is its own to update."""
    return Sharding(
        level=level,
        index=mesh.dp.index,
        count=mesh.dp.size,
        divided=(mesh.expert_dp.index, mesh.expert_dp.size),
    )


def build_chunks(spec: JobSpec, config: GptConfig, mesh: Mesh) -> list[GptChunk]:
    """This stage's parts of the model, in model order."""
    parts = stage_parts(
        config.layers,
        stage=mesh.at.pp,
        num_stages=mesh.layout.pp,
        num_chunks=spec.parallel.virtual_stages,
        folds=spec.parallel.folds,
        given=spec.parallel.layer_split,
    )
    return chunks_of(config, mesh, parts)
