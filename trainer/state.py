"""Everything a rank trains with, built from the job spec.

This is the one place where the spec is translated into the configurations of
the parts.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint.stage import NamedTensor
from outlast.spec import JobSpec
from trainer.core import schedule as schedules
from trainer.core.batch import BatchPlan
from trainer.core.partition import stage_parts
from trainer.data.dataset import TokenDataset
from trainer.data.loader import Loader
from trainer.data.prepare import DataOptions, prepare
from trainer.model.config import GptConfig, RopeConfig
from trainer.model.gpt import GptChunk
from trainer.model.parameters import FlatParameters
from trainer.optim.adamw import AdamWConfig, FlatAdamW
from trainer.optim.schedule import LearningRate
from trainer.parallel.mesh import Mesh
from trainer.parallel.pipeline import PipelineEngine

_NCCL_CHOICES = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The model of one rank and what moves it."""

    spec: JobSpec
    mesh: Mesh
    flat: FlatParameters
    optimizer: FlatAdamW
    learning_rate: LearningRate
    train_engine: PipelineEngine
    eval_engine: PipelineEngine
    train_loader: Loader
    eval_loader: Loader
    data_digest: str

    @property
    def splits_sequence(self) -> bool:
        return self.spec.parallel.sequence_parallel and self.mesh.tp.size > 1

    def named_tensors(self) -> list[NamedTensor]:
        """All tensors that a checkpoint holds, with their place in the whole model."""
        kinds: tuple[tuple[str, str, Tensor], ...] = (
            ("model.", "", self.flat.values),
            ("optim.", ".exp_avg", self.optimizer.exp_avg),
            ("optim.", ".exp_avg_sq", self.optimizer.exp_avg_sq),
        )
        return [
            NamedTensor(
                name=f"{prefix}{name}{suffix}",
                tensor=self.flat.view(buffer, name),
                global_shape=facts.global_shape,
                offsets=facts.offsets,
            )
            for prefix, suffix, buffer in kinds
            for name, facts in self.flat.facts.items()
        ]

    def extra(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` holds besides tensors."""
        return {
            "step": step,
            "loader": {
                "next_sample": step * self.spec.data.global_batch,
                "seed": self.spec.seed,
                "data_digest": self.data_digest,
            },
            "rng": {"torch_cpu": bytes(torch.get_rng_state().numpy()).hex()},
            "schedule": {"learning_rate": self.learning_rate.at(max(1, step))},
            "environment": environment(self.mesh.device),
        }

    def apply_extra(self, extra: dict[str, Any]) -> list[str]:
        """Restore the RNG state; returns what is no longer as it was when `extra` was made.

        Raises:
            ValueError: the text or the order of samples is another one, so going on would
                train on a mixture.
        """
        state = bytearray.fromhex(extra["rng"]["torch_cpu"])
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
        loader = extra["loader"]
        if loader["data_digest"] != self.data_digest:
            raise ValueError(
                f"data.source {self.spec.data.source!r}: its text has changed since the checkpoint "
                f"of step {extra['step']} (digest was {loader['data_digest']}, is "
                f"{self.data_digest}); bring the old text back or submit a new job"
            )
        own = self.extra(extra["step"])
        if loader != own["loader"]:
            raise ValueError(
                f"the checkpoint of step {extra['step']} is of another job: its loader stood at "
                f"{loader}, this job's is at {own['loader']}"
            )
        before = extra["environment"] | extra["schedule"]
        now = own["environment"] | own["schedule"]
        return [
            f"{name} {before.get(name)} is now {now.get(name)}"
            for name in dict.fromkeys((*before, *now))
            if before.get(name) != now.get(name)
        ]


def build_state(spec: JobSpec, mesh: Mesh, data_dir: Path) -> TrainState:
    """Build the rank's model and its surroundings; values are not initialised yet.

    Raises:
        ValueError: the data cannot feed this model.
    """
    config = gpt_config(spec)
    chunks = _chunks(spec, config, mesh)
    flat = FlatParameters(chunks, tp_size=mesh.tp.size)
    train_engine, eval_engine = _engines(spec, mesh, chunks)
    optimizer = spec.optimizer
    files = prepare(data_dir, _data_options(spec))
    return TrainState(
        spec=spec,
        mesh=mesh,
        flat=flat,
        optimizer=FlatAdamW(
            flat,
            AdamWConfig(
                beta1=optimizer.beta1,
                beta2=optimizer.beta2,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
            ),
        ),
        learning_rate=LearningRate(
            name=optimizer.schedule.name,
            peak=optimizer.lr,
            warmup_steps=optimizer.schedule.warmup_steps,
            min_ratio=optimizer.schedule.min_ratio,
            steps=spec.steps,
        ),
        train_engine=train_engine,
        eval_engine=eval_engine,
        train_loader=_loader(spec, mesh, files.train),
        eval_loader=_loader(spec, mesh, files.validation),
        data_digest=files.digest,
    )


def _chunks(spec: JobSpec, config: GptConfig, mesh: Mesh) -> list[GptChunk]:
    """This stage's parts of the model, in model order."""
    parts = stage_parts(
        config.layers,
        stage=mesh.at.pp,
        num_stages=mesh.layout.pp,
        num_chunks=spec.parallel.virtual_stages,
        given=spec.parallel.layer_split,
    )
    return [GptChunk(config, mesh, part) for part in parts]


def _engines(
    spec: JobSpec, mesh: Mesh, chunks: Sequence[GptChunk]
) -> tuple[PipelineEngine, PipelineEngine]:
    """One that trains and one that evaluates, on the same chunks."""
    parallel, model = spec.parallel, spec.model
    splits = parallel.sequence_parallel and mesh.tp.size > 1
    local_seq = model.seq_len // mesh.tp.size if splits else model.seq_len
    training = schedules.build(
        parallel.schedule,
        parallel.pp,
        spec.num_micro_batches,
        num_chunks=parallel.virtual_stages,
        extra_warmup=parallel.extra_warmup,
    )
    schedules.check(training)
    evaluation = schedules.forward_only(
        parallel.pp, spec.num_micro_batches, num_chunks=parallel.virtual_stages
    )
    train_engine, eval_engine = (
        PipelineEngine(
            chunks,
            mesh,
            schedule,
            boundary=(local_seq, parallel.micro_batch, model.hidden),
            replicated=mesh.tp.size > 1 and not splits,
        )
        for schedule in (training, evaluation)
    )
    return train_engine, eval_engine


def gpt_config(spec: JobSpec) -> GptConfig:
    """The model section of the spec, in the model's own words."""
    model, parallel = spec.model, spec.parallel
    rope = RopeConfig(theta=model.rope_theta, fraction=model.rope_fraction, pairs=model.rope_pairs)
    return GptConfig(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        mlp_hidden=model.mlp_hidden,
        vocab_size=model.vocab_size,
        seq_len=model.seq_len,
        tied_embeddings=model.tied_embeddings,
        norm_eps=model.norm_eps,
        init_std=model.init_std,
        sequence_parallel=parallel.sequence_parallel,
        dtype=DTYPES[spec.precision],
        kv_heads=model.kv_heads,
        block=model.block,
        block_norms=model.block_norms,
        norm=model.norm,
        norm_bias=model.norm_bias,
        activation=model.activation,
        learned_positions=model.positions == "learned",
        rope=rope if model.positions == "rope" else None,
        window=model.window,
        window_pattern=model.window_pattern,
        attention_bias=model.attention_bias,
        mlp_bias=model.mlp_bias,
        head_bias=model.head_bias,
        logit_scale=model.logit_scale,
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        seed=spec.seed,
        tp_chunks=parallel.tp_chunks,
        recompute=parallel.recompute,
    )


def environment(device: torch.device) -> dict[str, str]:
    """What decides the bits of the arithmetic besides the job itself."""
    found = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads_per_rank": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": platform.machine(),
    }
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        # torch's stubs leave this function untyped.
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found["nccl"] = ".".join(str(part) for part in version)
        # NCCL sums in the order that these decide.
        found |= {name: os.environ[name] for name in _NCCL_CHOICES if name in os.environ}
    return found


def _data_options(spec: JobSpec) -> DataOptions:
    return DataOptions(
        source=spec.data.source,
        tokenizer=spec.data.tokenizer,
        validation_fraction=spec.data.validation_fraction,
        max_bytes=spec.data.max_bytes,
    )


def _loader(spec: JobSpec, mesh: Mesh, path: Path) -> Loader:
    dataset = TokenDataset(path, seq_len=spec.model.seq_len)
    plan = BatchPlan(
        num_samples=dataset.num_samples,
        global_batch=spec.data.global_batch,
        micro_batch=spec.parallel.micro_batch,
        num_replicas=spec.parallel.dp,
        seed=spec.seed,
    )
    return Loader(dataset, plan, replica=mesh.at.dp, device=mesh.device)
