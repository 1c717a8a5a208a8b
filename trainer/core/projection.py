"""How long a step should take on a named device over a named link, and its MFU.

A projection, not a promise: kernels are taken to reach a share of the device's
peak that the caller names, messages to run at the link's speed, and what can hide
to hide. Then for each stage and micro-batch

    time = products / (share x peak) + tensor-parallel messages that do not hide

and a step takes the busiest stage's micro-batches, the way of one micro-batch
through the other stages (the bubble), the messages of filling and draining the
pipeline, and what of the replicas' messages is longer than the passes that they
run beside. Embeddings, norms and activations are taken to cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from outlast.flops import (
    Convention,
    ExpertShape,
    ModelShape,
    flops_per_token,
    recomputed_flops_per_token,
    utilization,
)
from outlast.sizing.parameters import PlanInput, layers_of
from trainer.core.traffic import (
    embedding_bytes,
    end_bytes,
    expert_bytes,
    layer_bytes,
    message_bytes,
    replica_messages,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a rank computes on, and the links between ranks."""

    peak_flops_per_s: float
    kernel_share: float
    """Of the peak, that matrix products reach."""
    peer_bytes_per_s: float
    """Between ranks of a node."""
    link_bytes_per_s: float
    """Between nodes."""
    ranks_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A step on a machine; exposed times are part of `step_s`, hidden ones are not."""

    step_s: float
    compute_s: float
    """Of the busiest stage; it decides."""
    bubble_s: float
    tp_exposed_s: float
    pp_exposed_s: float
    dp_exposed_s: float
    tokens_per_s: float
    mfu_full: float
    mfu_windowed: float
    tp_bytes_per_s: float
    """Of the link that tensor groups were taken to use; as below."""
    pp_bytes_per_s: float
    dp_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One micro-batch on a stage."""

    forward_s: float
    backward_s: float
    """Recompute included."""
    tensor_s: float
    """Messages of tensor groups that do not hide, and those between experts, none of which do."""

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tensor_s


def project(facts: PlanInput, machine: Machine) -> Projection:
    """The step that `facts` describe on `machine`."""
    layout, micro_batches = facts.layout, facts.num_micro_batches
    tp_speed = _speed(layout.tp_groups(), machine)
    pp_speed = _speed(layout.pp_groups(), machine)
    dp_speed = _speed(layout.dp_groups(), machine)
    stages = range(layout.pp)
    passes = [_stage_pass(facts, machine, stage, tp_speed) for stage in stages]
    busiest = max(passes, key=lambda one: one.total_s)
    # A chunk is a part of a stage, and the pipeline fills and drains chunk by chunk.
    others_s = sum(one.total_s for one in passes) - busiest.total_s
    bubble_s = others_s / facts.virtual_stages
    hops = 2 * (layout.pp - 1)
    # Nothing runs beside the sum of a tied table's gradients.
    pipeline_s = (hops * message_bytes(facts) + embedding_bytes(facts)) / pp_speed
    exposed_s = max(_exposed_replicas_s(facts, stage, passes[stage], dp_speed) for stage in stages)
    step_s = micro_batches * busiest.total_s + bubble_s + pipeline_s + exposed_s
    tokens_per_s = facts.global_batch * facts.model.shape.seq_len / step_s

    def mfu(convention: Convention) -> float:
        return utilization(
            tokens_per_s * flops_per_token(facts.model.shape, convention),
            devices=layout.world_size,
            peak_flops_per_s=machine.peak_flops_per_s,
        )

    return Projection(
        step_s=step_s,
        compute_s=micro_batches * busiest.compute_s,
        bubble_s=bubble_s,
        tp_exposed_s=micro_batches * busiest.tensor_s,
        pp_exposed_s=pipeline_s,
        dp_exposed_s=exposed_s,
        tokens_per_s=tokens_per_s,
        mfu_full=mfu(Convention.FULL),
        mfu_windowed=mfu(Convention.WINDOWED),
        tp_bytes_per_s=tp_speed,
        pp_bytes_per_s=pp_speed,
        dp_bytes_per_s=dp_speed,
    )


def _speed(groups: Iterable[Sequence[int]], machine: Machine) -> float:
    """Of the link inside a node where no group leaves its own, else of the network."""
    inside = all(len({rank // machine.ranks_per_node for rank in group}) == 1 for group in groups)
    return machine.peer_bytes_per_s if inside else machine.link_bytes_per_s


def _stage_pass(facts: PlanInput, machine: Machine, stage: int, tp_speed: float) -> _Pass:
    """One micro-batch through all chunks of `stage`."""
    shape, convention = facts.model.shape, Convention.WINDOWED
    parts = facts.parts(stage)
    layers, windows = layers_of(parts), list(shape.layer_windows())
    own = replace(
        shape,
        layers=len(layers),
        windows=tuple(windows[layer] for layer in layers),
        experts=_experts_of(shape, layers),
        # The output projection is the last stage's.
        vocab_size=shape.vocab_size if any(part.is_last for part in parts) else 0,
    )
    model = flops_per_token(own, convention)
    again = recomputed_flops_per_token(own, [facts.recompute[n] for n in layers], convention)
    flops_per_s = facts.layout.tp * machine.peak_flops_per_s * machine.kernel_share
    # A backward pass is two matrix products for each one of the forward pass.
    forward_s = facts.tokens * model / 3 / flops_per_s
    backward_s = facts.tokens * (2 * model / 3 + again) / flops_per_s
    # Of c pieces of a layer's message, c - 1 hide behind products, as far as these last.
    message_s = layer_bytes(facts, stage) / tp_speed
    first_s = message_s / facts.tp_chunks
    experts_s = expert_bytes(facts, stage) / _speed(facts.layout.ep_groups(), machine)
    beyond_s = max(0.0, message_s - first_s - forward_s - backward_s)
    return _Pass(
        forward_s=forward_s,
        backward_s=backward_s,
        tensor_s=first_s + beyond_s + end_bytes(facts, stage) / tp_speed + experts_s,
    )


def _experts_of(shape: ModelShape, layers: Sequence[int]) -> ExpertShape | None:
    if shape.experts is None:
        return None
    has_experts = tuple(shape.experts_of(layer) is not None for layer in layers)
    return replace(shape.experts, layers=has_experts)


def _exposed_replicas_s(facts: PlanInput, stage: int, one: _Pass, speed: float) -> float:
    """What each pass's own messages to the replicas last longer than the pass.

    Weights are gathered beside forward passes, and again beside backward ones where
    they were dropped; gradients are reduced beside backward passes, or the last one.
    """
    sent, micro_batches = replica_messages(facts, stage), facts.num_micro_batches
    gather_s, reduce_s = sent.gathered_bytes / speed, sent.reduced_bytes / speed
    again_s = sent.gathered_again_bytes / speed if sent.backward_gathers else 0.0
    forward_s = sent.forward_gathers * max(0.0, gather_s - one.forward_s)
    reducing_s = sent.reductions * max(0.0, reduce_s + again_s - one.backward_s)
    others_s = (micro_batches - sent.reductions) * max(0.0, again_s - one.backward_s)
    return forward_s + reducing_s + others_s
