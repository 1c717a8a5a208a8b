"""How long a step should take on a named device over a named link, and its MFU.

A projection, not a promise: kernels are taken to reach a share of the device's
peak that the caller names, messages to take a time each to begin and then to run at the
link's speed (Hockney's model), and what can hide to hide. Then for each stage and micro-batch

    time = products / (share x peak) + tensor-parallel messages that do not hide

and a step takes the busiest stage's micro-batches, the way of one micro-batch
through the other stages (the bubble), the messages of filling and draining the
pipeline, what of a stage's messages to its neighbours is longer than the pass beside
them, and what of the replicas' messages is longer than the passes that they run
beside. Embeddings, norms and activations are taken to cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from outlast.flops import (
    Convention,
    ExpertShape,
    ModelShape,
    flops_per_token,
    recomputed_flops_per_token,
    utilization,
)
from outlast.sizing.parameters import PlanInput, alike_stages, layers_of
from trainer.core.message_counts import (
    context_messages,
    end_messages,
    expert_messages,
    layer_messages,
    unit_messages,
)
from trainer.core.schedule import ActionKind, zero_bubble_v_share
from trainer.core.traffic import (
    boundaries,
    context_passes,
    embedding_bytes,
    end_bytes,
    expert_bytes,
    layer_bytes,
    layer_passes,
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
    latency_s: float = 0.0
    """Of each collective, and of each send that fills or drains a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A step on a machine; exposed times are part of `step_s`, hidden ones are not."""

    step_s: float
    compute_s: float
    """Of the busiest stage; it decides."""
    recompute_s: float
    """Of that, what is computed a second time."""
    bubble_s: float
    tp_exposed_s: float
    """And of ranks that divide sequences or experts."""
    pp_exposed_s: float
    dp_exposed_s: float
    tokens_per_s: float
    mfu_full: float
    mfu_windowed: float
    hfu_full: float
    """Hardware utilization: what is computed again counts as well; as below."""
    hfu_windowed: float
    tp_bytes_per_s: float
    """Of the link that tensor groups were taken to use; as below."""
    pp_bytes_per_s: float
    dp_bytes_per_s: float
    cp_bytes_per_s: float
    ep_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Links:
    """The speed at which the groups of each kind send, in bytes per second."""

    tp: float
    pp: float
    dp: float
    cp: float
    ep: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One micro-batch on a stage."""

    forward_s: float
    backward_s: float
    """Recompute included."""
    again_s: float
    """Of that, the recompute."""
    weights_s: float
    """And gradients of weights, which can be put off."""
    tensor_s: float
    """Messages of tensor groups and of rings that do not hide; those between experts, and of heads
    that are swapped, none of which do."""
    tensor_forward_s: float
    """Of that, what goes with the forward pass."""

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tensor_s


def project(facts: PlanInput, machine: Machine) -> Projection:
    """The step that `facts` describe on `machine`."""
    layout, micro_batches = facts.layout, facts.num_micro_batches
    links, alike = _links(facts, machine), alike_stages(facts)
    passes = {stage: _stage_pass(facts, machine, stage, links) for stage in alike}
    busiest = max(passes.values(), key=lambda one: one.total_s)
    # A chunk is a part of a stage, and the pipeline fills and drains chunk by chunk.
    all_s = sum(count * passes[stage].total_s for stage, count in alike.items())
    bubble_s = (all_s - busiest.total_s) / facts.virtual_stages
    if facts.folds:
        bubble_s = _folded_bubble_s(facts, passes, alike, busiest)
    elif facts.splits_backward:
        weights_s = sum(count * passes[stage].weights_s for stage, count in alike.items())
        bubble_s -= _filled_share(facts) * (weights_s - busiest.weights_s)
    beyond_s = max(
        max(0.0, boundaries(facts, stage) * message_bytes(facts) / links.pp - one.total_s)
        for stage, one in passes.items()
    )
    hops = 2 * (layout.pp - 1)
    pipeline_s = hops * (message_bytes(facts) / links.pp + machine.latency_s)
    # Nothing runs beside the sum of a tied table's gradients.
    if sent := embedding_bytes(facts):
        pipeline_s += sent / links.pp + machine.latency_s
    pipeline_s += micro_batches * beyond_s
    exposed_s = max(
        _exposed_replicas_s(facts, stage, passes[stage], links.dp, machine.latency_s)
        for stage in alike
    )
    step_s = micro_batches * busiest.total_s + bubble_s + pipeline_s + exposed_s
    return Projection(
        step_s=step_s,
        compute_s=micro_batches * busiest.compute_s,
        recompute_s=micro_batches * busiest.again_s,
        bubble_s=bubble_s,
        tp_exposed_s=micro_batches * busiest.tensor_s,
        pp_exposed_s=pipeline_s,
        dp_exposed_s=exposed_s,
        tokens_per_s=_tokens_per_step(facts) / step_s,
        mfu_full=_utilization(facts, machine, step_s, Convention.FULL),
        mfu_windowed=_utilization(facts, machine, step_s, Convention.WINDOWED),
        hfu_full=_utilization(facts, machine, step_s, Convention.FULL, again=True),
        hfu_windowed=_utilization(facts, machine, step_s, Convention.WINDOWED, again=True),
        tp_bytes_per_s=links.tp,
        pp_bytes_per_s=links.pp,
        dp_bytes_per_s=links.dp,
        cp_bytes_per_s=links.cp,
        ep_bytes_per_s=links.ep,
    )


def least_step_s(facts: PlanInput, machine: Machine) -> float:
    """No step of `facts` is shorter: its products, evenly on all stages, with their bubble."""
    shape, convention, layout = facts.model.shape, Convention.WINDOWED, facts.layout
    per_token = flops_per_token(shape, convention)
    per_token += recomputed_flops_per_token(shape, facts.recompute, convention)
    speed = layout.tp * layout.pp * machine.peak_flops_per_s * machine.kernel_share
    # One micro-batch on one of as many stages that take equally long.
    pass_s = facts.tokens * per_token / speed
    bubble = (layout.pp - 1) / facts.virtual_stages
    # Gradients of weights are a third of the products at most, those of inputs one at least.
    if facts.folds:
        bubble /= 3
    elif facts.splits_backward:
        bubble *= 1 - _filled_share(facts) / 3
    return pass_s * (facts.num_micro_batches + bubble)


def _folded_bubble_s(
    facts: PlanInput, passes: Mapping[int, _Pass], alike: Mapping[int, int], busiest: _Pass
) -> float:
    """What ZB-V waits where all stages but the busiest take as long as these do on average."""
    others = facts.layout.pp - 1

    def mean_s(of: Callable[[_Pass], float]) -> float:
        return (sum(count * of(passes[at]) for at, count in alike.items()) - of(busiest)) / others

    forward_s = mean_s(lambda one: one.forward_s + one.tensor_forward_s)
    weights_s = mean_s(lambda one: one.weights_s)
    whole_s = mean_s(lambda one: one.total_s)
    costs = {
        ActionKind.FORWARD: forward_s,
        ActionKind.BACKWARD_INPUT: whole_s - forward_s - weights_s,
        ActionKind.BACKWARD_WEIGHT: weights_s,
    }
    share = zero_bubble_v_share(facts.layout.pp, facts.num_micro_batches, costs)
    return facts.num_micro_batches * whole_s * share / (1 - share)


def _filled_share(facts: PlanInput) -> float:
    """How often the gradients of weights fit into the bubble of 1F1B: twice, as ZB-H1 has it.

    They leave the way of one micro-batch through the pipeline, and so do those that a stage has
    put off: as many as it has micro-batches behind it.
    """
    num_put_off = min(facts.layout.pp, facts.num_micro_batches) - 1
    return 1 + num_put_off / max(1, facts.layout.pp - 1)


def _tokens_per_step(facts: PlanInput) -> int:
    return facts.global_batch * facts.model.shape.seq_len


def _utilization(
    facts: PlanInput,
    machine: Machine,
    step_s: float,
    convention: Convention,
    *,
    again: bool = False,
) -> float:
    """Of what the devices can do; `again`: what is computed a second time counts too."""
    per_token = flops_per_token(facts.model.shape, convention)
    if again:
        per_token += recomputed_flops_per_token(facts.model.shape, facts.recompute, convention)
    return utilization(
        _tokens_per_step(facts) / step_s * per_token,
        devices=facts.layout.world_size,
        peak_flops_per_s=machine.peak_flops_per_s,
    )


def _links(facts: PlanInput, machine: Machine) -> _Links:
    layout = facts.layout
    return _Links(
        tp=_speed(layout.tp, layout.tp, facts, machine),
        pp=_speed(layout.pp, layout.world_size, facts, machine),
        dp=_speed(layout.dp, layout.tp * layout.dp, facts, machine),
        cp=_speed(layout.cp, layout.tp * layout.cp, facts, machine),
        ep=_speed(layout.ep, layout.tp * layout.ep, facts, machine),
    )


def _speed(degree: int, span: int, facts: PlanInput, machine: Machine) -> float:
    """Of the link inside a node where no group leaves its own, else of the network.

    `degree` ranks of a group lie within `span` consecutive ranks, and such spans fill the job:
    a border between nodes that is inside of a span cuts a group.
    """
    per_node = machine.ranks_per_node
    fits = per_node % span == 0 or facts.layout.world_size <= per_node
    return machine.peer_bytes_per_s if degree == 1 or fits else machine.link_bytes_per_s


def _stage_pass(facts: PlanInput, machine: Machine, stage: int, links: _Links) -> _Pass:
    """One micro-batch through all chunks of `stage`."""
    shape, convention = facts.model.shape, Convention.WINDOWED
    parts = facts.parts(stage)
    layers = layers_of(parts)
    own = replace(
        shape,
        layers=len(layers),
        windows=tuple(shape.window_of(layer) for layer in layers),
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
    weights = 2 * sum(shape.block_weights(layer) for layer in layers)
    # Of c pieces of a layer's message, c - 1 hide behind products, as far as these last.
    latency_s = machine.latency_s
    first_s = layer_bytes(facts, stage) / links.tp / facts.tp_chunks
    first_s += layer_messages(facts, stage) * latency_s
    message_s = facts.tp_chunks * first_s
    ends_s = end_bytes(facts, stage) / links.tp + end_messages(facts, stage) * latency_s
    experts_s = expert_bytes(facts, stage) / links.ep + expert_messages(facts, stage) * latency_s
    # In a ring messages go beside the products of attention, which are twice as many backwards.
    attention = recomputed_flops_per_token(own, ["selective"] * len(layers), convention)
    beside_s = facts.tokens * attention / flops_per_s if facts.in_ring else 0.0
    there, back = (
        sent / links.cp + number * latency_s
        for sent, number in zip(
            context_passes(facts, stage), context_messages(facts, stage), strict=True
        )
    )
    parts_s = max(0.0, there - beside_s) + max(0.0, back - 2 * beside_s)
    beyond_s = max(0.0, message_s - first_s - forward_s - backward_s)
    tensor_s = first_s + beyond_s + ends_s + experts_s + parts_s
    forward, backward = layer_passes(facts, layers[0])
    return _Pass(
        forward_s=forward_s,
        backward_s=backward_s,
        again_s=facts.tokens * again / flops_per_s,
        weights_s=facts.tokens * weights / flops_per_s,
        tensor_s=tensor_s,
        tensor_forward_s=tensor_s * forward / (forward + backward),
    )


def _experts_of(shape: ModelShape, layers: Sequence[int]) -> ExpertShape | None:
    if shape.experts is None:
        return None
    has_experts = tuple(shape.experts_of(layer) is not None for layer in layers)
    return replace(shape.experts, layers=has_experts)


def _exposed_replicas_s(
    facts: PlanInput, stage: int, one: _Pass, speed: float, latency_s: float
) -> float:
    """What each pass's own messages to the replicas last longer than the pass.

    Weights are gathered beside forward passes, and again beside backward ones where
    they were dropped; gradients are reduced beside backward passes, or the last ones.
    The first gather and the last sum have nothing beside them while they begin.
    """
    sent, micro_batches = replica_messages(facts, stage), facts.num_micro_batches
    begin_s = unit_messages(facts, stage) * latency_s
    gather_s, reduce_s = sent.gathered_bytes / speed + begin_s, sent.reduced_bytes / speed + begin_s
    again_s = sent.gathered_again_bytes / speed + begin_s if sent.backward_gathers else 0.0
    if sent.forward_gathers > 1:
        forward_s = sent.forward_gathers * max(0.0, gather_s - one.forward_s)
    else:
        forward_s = sent.forward_gathers * _exposed_once_s(facts, gather_s, one.forward_s)
    if sent.reductions > 1 or sent.backward_gathers:
        reducing_s = sent.reductions * max(0.0, reduce_s + again_s - one.backward_s)
    else:
        reducing_s = _exposed_once_s(facts, reduce_s, one.backward_s)
    others_s = (micro_batches - sent.reductions) * max(0.0, again_s - one.backward_s)
    ends_s = ((sent.forward_gathers > 0) + 1) * latency_s if begin_s else 0.0
    return max(forward_s + reducing_s + others_s, ends_s)


def _exposed_once_s(facts: PlanInput, message_s: float, pass_s: float) -> float:
    """What is left of one message a step, a chunk's part of which goes beside the chunk's pass.

    Chunks of a stage take turns, each with a round of micro-batches: only the part of the first
    chunk, or of the last one in a backward pass, has no more than its own pass to hide behind.
    """
    chunks, round_size = facts.virtual_stages, min(facts.layout.pp, facts.num_micro_batches)
    all_s = pass_s / chunks * (1 + (chunks - 1) * round_size)
    return max(0.0, (message_s - pass_s) / chunks, message_s - all_s)
