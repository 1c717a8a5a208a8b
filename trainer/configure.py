"""The optimizer's, ZeRO's and precision's sections of the spec, in those parts' own words."""

from __future__ import annotations

import torch

from outlast.spec import JobSpec
from trainer.model.parameters import FlatParameters
from trainer.optim.adamw import AdamWConfig, FlatAdamW
from trainer.optim.lamb import FlatLamb, LambConfig
from trainer.optim.loss_scale import LossScale
from trainer.optim.schedule import LearningRate
from trainer.parallel.mesh import Mesh
from trainer.parallel.zero import ZeroConfig

DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def zero_config(spec: JobSpec) -> ZeroConfig:
    """What ZeRO trades, with the defaults that depend on the pipeline."""
    zero = spec.parallel.zero
    # A pipeline's stage uses its chunks many times a step: gathering each time would cost
    # more than the memory is worth.
    default = "step" if spec.parallel.pp > 1 else "micro_batch"
    return ZeroConfig(
        reshard_each_micro_batch=(zero.reshard_after or default) == "micro_batch",
        reduce_each_micro_batch=(zero.reduce_after or default) == "micro_batch",
        wire=None if zero.communication is None else DTYPES[zero.communication],
    )


def optimizer(spec: JobSpec, flat: FlatParameters, mesh: Mesh) -> FlatAdamW | FlatLamb:
    """The optimizer that the spec names, over what this rank owns."""
    given = spec.optimizer
    adam = AdamWConfig(
        beta1=given.beta1, beta2=given.beta2, eps=given.eps, weight_decay=given.weight_decay
    )
    if given.name == "adamw":
        return FlatAdamW(flat, adam)
    config = LambConfig(adam=adam, phi_min=given.lamb.phi_min, phi_max=given.lamb.phi_max)
    return FlatLamb(flat, config, mesh)


def learning_rate(spec: JobSpec) -> LearningRate:
    """The learning rate over the steps of the job."""
    given = spec.optimizer
    return LearningRate(
        name=given.schedule.name,
        peak=given.lr,
        warmup_steps=given.schedule.warmup_steps,
        min_ratio=given.schedule.min_ratio,
        steps=spec.steps,
        decay_steps=given.schedule.decay_steps or max(1, spec.steps // 10),
    )


def loss_scale(spec: JobSpec) -> LossScale | None:
    """The loss scale that fp16 needs; None for other precisions."""
    if spec.precision != "fp16":
        return None
    given = spec.loss_scale
    return LossScale(
        scale=given.initial, growth_interval=given.growth_interval, minimum=given.minimum
    )
