"""How long a step should take on a named device over a named link, and its MFU.

A projection, not a promise: kernels are taken to reach a share of the device's
peak that the caller names, messages to run at the link's speed, and what can hide
to hide. Then for each rank and micro-batch

    time = products / (share x peak) + tensor-parallel messages that do not hide

and a step takes the busiest stage's micro-batches, its bubble, the messages of one
filling and draining of the pipeline, and what of the replicas' messages is longer
than the backward pass of the last micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlast.flops import (
    Convention,
    flops_per_token,
    recomputed_flops_per_token,
    utilization,
)
from trainer.core.sizes import PlanInput
from trainer.core.timing import bubble
from trainer.core.traffic import Communication, layer_passes, stream_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a rank computes on, and the links between ranks."""

    peak_flops_per_s: float
    kernel_share: float
    """Of the peak, that matrix products reach."""
    tp_bytes_per_s: float
    link_bytes_per_s: float
    """Between pipeline stages and between replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A step on a machine; exposed times are part of `step_s`, hidden ones are not."""

    step_s: float
    compute_s: float
    bubble_s: float
    tp_exposed_s: float
    pp_exposed_s: float
    dp_exposed_s: float
    tokens_per_s: float
    mfu_full: float
    mfu_windowed: float


def project(facts: PlanInput, sent: Communication, machine: Machine) -> Projection:
    """The step that `facts` describe on `machine`."""
    layout, micro_batches = facts.layout, facts.num_micro_batches
    compute_s = _micro_batch_s(facts, machine)
    tensor_s = _exposed_tensor_s(facts, machine, compute_s)
    busy_s = micro_batches * (compute_s + tensor_s)
    waiting = bubble(facts)
    bubble_s = busy_s * waiting / (1 - waiting)
    boundary_s = sent.pp_bytes / micro_batches / machine.link_bytes_per_s
    pipeline_s = (layout.pp - 1) * boundary_s
    # A backward pass is two of the three parts of a micro-batch's work.
    replicas_s = (sent.dp_bytes + sent.embedding_bytes) / machine.link_bytes_per_s
    hidden_s = 2 / 3 * compute_s
    exposed_s = max(0.0, replicas_s - hidden_s)
    step_s = busy_s + bubble_s + pipeline_s + exposed_s
    tokens_per_s = facts.global_batch * facts.model.shape.seq_len / step_s

    def mfu(convention: Convention) -> float:
        return utilization(
            tokens_per_s * flops_per_token(facts.model.shape, convention),
            devices=layout.world_size,
            peak_flops_per_s=machine.peak_flops_per_s,
        )

    return Projection(
        step_s=step_s,
        compute_s=micro_batches * compute_s,
        bubble_s=bubble_s,
        tp_exposed_s=micro_batches * tensor_s,
        pp_exposed_s=pipeline_s,
        dp_exposed_s=exposed_s,
        tokens_per_s=tokens_per_s,
        mfu_full=mfu(Convention.FULL),
        mfu_windowed=mfu(Convention.WINDOWED),
    )


def _micro_batch_s(facts: PlanInput, machine: Machine) -> float:
    """Products of one micro-batch on the ranks of a mean stage, recompute included."""
    shape, convention = facts.model.shape, Convention.WINDOWED
    per_token = flops_per_token(shape, convention)
    per_token += recomputed_flops_per_token(shape, facts.recompute, convention)
    ranks = facts.layout.tp * facts.layout.pp
    return facts.tokens * per_token / ranks / (machine.peak_flops_per_s * machine.kernel_share)


def _exposed_tensor_s(facts: PlanInput, machine: Machine, compute_s: float) -> float:
    """Of c pieces of a message, c - 1 hide behind products, as far as these last."""
    if facts.layout.tp == 1:
        return 0.0
    passes = sum(sum(layer_passes(facts, mode)) for mode in facts.recompute) / facts.layout.pp
    message_s = passes * stream_bytes(facts) / machine.tp_bytes_per_s
    first_s = message_s / facts.tp_chunks
    return first_s + max(0.0, message_s - first_s - compute_s)
