"""Everything a rank trains with, built from the job spec.

This is the one place where the spec is translated into the configurations of
the parts.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from checkpoint.core.ownership import Copies, Held, owned
from checkpoint.stage.payload import NamedTensor
from outlast.section import Section
from outlast.spec import JobSpec
from outlast.spec.saved import described
from trainer.core import schedule as schedules
from trainer.core.rectangles import boxes
from trainer.data.node import NodeLoader
from trainer.model.carried import carried_rows
from trainer.model.config import GptConfig
from trainer.model.facts import ParameterFacts
from trainer.model.gpt import GptChunk
from trainer.model.parameters import FlatParameters
from trainer.optim.adamw import FlatAdamW
from trainer.optim.lamb import FlatLamb
from trainer.optim.loss_scale import LossScale
from trainer.optim.schedule import LearningRate
from trainer.parallel.comm import Comm
from trainer.parallel.hooks import ChunkHooks
from trainer.parallel.mesh import Mesh
from trainer.parallel.pipeline import PipelineEngine
from trainer.parallel.zero import DataParallel
from trainer.worker import configure
from trainer.worker.body import Body, build_body
from trainer.worker.feeding import Feeding, open_data
from trainer.worker.meter import StepMeter

# What a checkpoint means that does not say it: one from before there were such groups, and one of
# a schedule that places chunks as all but one do.
_UNSAID = {
    "parallel.ep": "1",
    "parallel.cp": "1",
    "parallel.context": "all_to_all",
    "parallel.schedule": "another one",
}
_NCCL_CHOICES = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE"),
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainState:
    """The model of one rank and what moves it."""

    spec: JobSpec
    mesh: Mesh
    flat: FlatParameters
    data_parallel: DataParallel
    optimizer: FlatAdamW | FlatLamb
    learning_rate: LearningRate
    loss_scale: LossScale | None
    meter: StepMeter
    train_engine: PipelineEngine
    eval_engine: PipelineEngine
    data: Feeding

    @property
    def splits_sequence(self) -> bool:
        return splits_sequence(self.spec, self.mesh)

    def named_tensors(self) -> list[NamedTensor]:
        """All tensors that a checkpoint holds, with their place in the whole model.

        Those that this rank saves for all that hold them come first.
        """
        optimizer = self.optimizer
        tensors = [
            (tensor, self.flat.facts[piece.name])
            for part in self.flat.parts
            for prefix, suffix, buffer in (
                ("model.", "", part.master),
                ("optim.", ".exp_avg", optimizer.exp_avg[part.place]),
                ("optim.", ".exp_avg_sq", optimizer.exp_avg_sq[part.place]),
            )
            for piece in part.pieces
            for tensor in _named(
                f"{prefix}{self.flat.facts[piece.name].stored}{suffix}",
                self.flat.facts[piece.name],
                buffer[piece.at],
                piece.inside,
            )
        ]
        # Fewer ranks hold the same experts where replicas divide these.
        divided = [each for each in tensors if each[1].divided]
        others = [each for each in tensors if not each[1].divided]
        placed = [*self._placed(others, self.mesh.dp), *self._placed(divided, self.mesh.expert_dp)]
        return sorted(placed, key=lambda tensor: not tensor.owned)

    def _placed(
        self, tensors: Sequence[tuple[NamedTensor, ParameterFacts]], replicas: Comm
    ) -> list[NamedTensor]:
        """Which of some tensors this rank saves; `replicas` hold the same ones without ZeRO."""
        alone = self.flat.level > 0
        shares = owned(
            [_held(tensor, facts, self.mesh) for tensor, facts in tensors],
            replicas=Copies() if alone else Copies(index=replicas.index, count=replicas.size),
            tensor_group=Copies(index=self.mesh.tp.index, count=self.mesh.tp.size),
            ends=Copies(index=self.mesh.embedding.index, count=self.mesh.embedding.size),
        )
        return [
            tensor._replace(owned=share) for (tensor, _), share in zip(tensors, shares, strict=True)
        ]

    def initialise(self) -> None:
        """The state before the first step, whatever a restore that failed has left."""
        self.flat.initialise(self.spec.seed)
        self.optimizer.reset()

    def extra(self, step: int) -> dict[str, Any]:
        """What a checkpoint of `step` holds besides tensors.

        A rank of another layout can go on from any rank's: samples follow from the step,
        and all ranks draw alike from the global generator, because what differs between
        them is drawn by name.
        """
        return {
            "step": step,
            "loader": self._loader_at(step),
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state(),
            "rng": {"torch_cpu": bytes(torch.get_rng_state().numpy()).hex()},
            "schedule": {"learning_rate": self.learning_rate.at(max(1, step))},
            "layout": _layout(self.spec),
            "environment": environment(self.mesh.device),
            **described(self.spec),
            **({"masked": masked} if (masked := _masked(self.spec)) else {}),
        }

    def _loader_at(self, step: int) -> dict[str, Any]:
        next_sample = step * self.spec.data.global_batch
        blend = self.data.blend
        return {
            "next_sample": next_sample,
            "seed": self.spec.seed,
            "data_digest": self.data.digest,
            # Weights may change in what is to come, and not in what was.
            **({} if blend is None else {"samples_by_source": blend.before(next_sample)}),
            # The same numbers are other samples then; checkpoints from before it do not say it.
            **({"packing": packing} if (packing := self.spec.data.packing) != "stream" else {}),
        }

    def apply_extra(self, extra: dict[str, Any]) -> list[str]:
        """Restore the RNG state; returns what is no longer as it was when `extra` was made.

        Raises:
            ValueError: the text or the order of samples is another one, so going on would
                train on a mixture.
        """
        if "weights_of" in extra:
            return [f"the weights are those of {extra['weights_of']}"]
        if "converted_from" in extra:
            # Another program's: it holds tensors. What else there is follows from the step.
            return [f"the checkpoint of step {extra['step']} is from {extra['converted_from']}"]
        state = bytearray.fromhex(extra["rng"]["torch_cpu"])
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
        loader = extra["loader"]
        if loader["data_digest"] != self.data.digest:
            raise ValueError(
                f"{self.data.name}: its text has changed since the checkpoint "
                f"of step {extra['step']} (digest was {loader['data_digest']}, is "
                f"{self.data.digest}); bring the old text back or submit a new job"
            )
        own = self.extra(extra["step"])
        if loader != own["loader"]:
            raise ValueError(
                f"the checkpoint of step {extra['step']} was trained on other samples: its loader "
                f"stood at {loader}, this job's is at {own['loader']}; go on with the same "
                "data, weights up to that step, data.packing, seed and data.global_batch"
            )
        if self.loss_scale is not None:
            if extra["loss_scale"] is None:
                raise ValueError(
                    f"the checkpoint of step {extra['step']} has no loss scale: it was not trained "
                    f"in {self.spec.precision!r}; go on in the precision that it was trained in"
                )
            self.loss_scale.restore(extra["loss_scale"])
        before, now = (
            _UNSAID
            | each["environment"]
            | each["layout"]
            | each["schedule"]
            | each.get("masked", {})
            for each in (extra, own)
        )
        return [
            f"{name} {before.get(name)} is now {now.get(name)}"
            for name in dict.fromkeys((*before, *now))
            if before.get(name) != now.get(name)
        ]


def build_state(
    spec: JobSpec,
    mesh: Mesh,
    data_dir: Path,
    node_loader: NodeLoader | None = None,
    body: Body | None = None,
) -> TrainState:
    """Build what moves the rank's model, and that too, unless an earlier attempt has.

    Raises:
        ValueError: the data cannot feed this model.
    """
    body = body or build_body(spec, mesh)
    flat, chunks = body.flat, body.chunks
    data_parallel = DataParallel(
        flat,
        chunks,
        mesh,
        configure.zero_config(spec),
        sequence_parallel=splits_sequence(spec, mesh),
    )
    meter = StepMeter(mesh.comms, body.memory, mesh.timeline, data_parallel)
    hooks = (meter, data_parallel)
    train_engine, eval_engine = _engines(spec, body.config, mesh, chunks, hooks)
    data = open_data(spec, mesh, data_dir, node_loader)
    return TrainState(
        spec=spec,
        mesh=mesh,
        flat=flat,
        data_parallel=data_parallel,
        optimizer=body.optimizer,
        learning_rate=configure.learning_rate(spec),
        loss_scale=configure.loss_scale(spec),
        meter=meter,
        train_engine=train_engine,
        eval_engine=eval_engine,
        data=data,
    )


def _engines(
    spec: JobSpec,
    config: GptConfig,
    mesh: Mesh,
    chunks: Sequence[GptChunk],
    hooks: Sequence[ChunkHooks],
) -> tuple[PipelineEngine, PipelineEngine]:
    """One that trains and one that evaluates, on the same chunks; `hooks` has one for each."""
    parallel = spec.parallel
    splits = splits_sequence(spec, mesh)
    rows = config.seq_len // mesh.cp.size
    rows = rows // mesh.tp.size if splits else rows
    rows += carried_rows(config, parallel.micro_batch, mesh.tp.size)
    training = schedules.build(
        parallel.schedule,
        parallel.pp,
        spec.num_micro_batches,
        num_chunks=parallel.virtual_stages,
        extra_warmup=parallel.extra_warmup,
    )
    schedules.check(training)
    evaluation = schedules.forward_only(
        parallel.pp,
        spec.num_micro_batches,
        num_chunks=parallel.virtual_stages,
        folds=parallel.folds,
    )
    train_engine, eval_engine = (
        PipelineEngine(
            chunks,
            mesh,
            schedule,
            boundary=(rows, parallel.micro_batch, config.hidden),
            hooks=listener,
            replicated=mesh.tp.size > 1 and not splits,
        )
        for schedule, listener in zip((training, evaluation), hooks, strict=True)
    )
    return train_engine, eval_engine


def splits_sequence(spec: JobSpec, mesh: Mesh) -> bool:
    """Whether ranks of a tensor group each see a part of the sequence between matmuls."""
    return spec.parallel.sequence_parallel and mesh.tp.size > 1


def _named(
    name: str, facts: ParameterFacts, values: Tensor, inside: slice
) -> Iterator[NamedTensor]:
    """Consecutive elements of this rank's shard of a tensor, as rectangles of the whole one."""
    for box in boxes(facts.shape, inside.start, inside.stop):
        start = box.start - inside.start
        offsets = [first + offset for first, offset in zip(facts.offsets, box.offsets, strict=True)]
        yield NamedTensor(
            name=name,
            tensor=values[start : start + math.prod(box.shape)].view(box.shape),
            global_shape=facts.global_shape,
            offsets=tuple(offsets),
        )


def _held(named: NamedTensor, facts: ParameterFacts, mesh: Mesh) -> Held:
    return Held(
        nbytes=named.tensor.nbytes,
        over_tensor_group=mesh.tp.size > 1 and not facts.is_sharded,
        tied=facts.tied,
    )


def environment(device: torch.device) -> dict[str, str]:
    """What decides the bits of the arithmetic besides the job itself."""
    found = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads_per_rank": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": _processor(),
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


def _processor() -> str:
    """The processor's model: libraries choose their kernels by it, not by its instructions only."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()


def _layout(spec: JobSpec) -> dict[str, str]:
    """What decides the order of sums, and with it their bits."""
    parallel = spec.parallel
    axes = (
        "tp",
        "pp",
        "dp",
        "ep",
        "cp",
        "context",
        "virtual_stages",
        "layer_split",
        "micro_batch",
        "sequence_parallel",
    )
    found = {f"parallel.{axis}": str(getattr(parallel, axis)) for axis in axes}
    found["parallel.zero.level"] = str(parallel.zero.level)
    # What of a schedule decides which sums there are.
    return found | ({"parallel.schedule": parallel.schedule} if parallel.folds else {})


def _masked(spec: JobSpec) -> dict[str, str]:
    """Which tokens are hidden, and how sequences are cut; nothing where none are."""
    masked = spec.data.masked
    if not masked.fraction:
        return {}
    sections: dict[str, Section] = {"masked": masked}
    if spec.model.sentence_order:
        sections["sentence_order"] = spec.data.sentence_order
    return {
        f"data.{section}.{name}": str(value)
        for section, given in sections.items()
        for name, value in given.model_dump().items()
    }
