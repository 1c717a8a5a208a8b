"""A projected step: what decides it, what hides, and which link each dimension uses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from outlast.flops import ModelShape
from outlast.layout import Layout
from outlast.sizing.parameters import ModelFacts, PlanInput, ZeroFacts
from trainer.core.projection import Machine, Projection, least_step_s, project
from trainer.core.traffic import embedding_bytes, message_bytes, replica_messages

SHAPE = ModelShape(
    layers=8, hidden=64, heads=4, kv_heads=4, mlp_hidden=256, vocab_size=256, seq_len=32
)
# A block's matrices: 12 h^2, and attention's two products with 16.5 keys on average.
BLOCK_FLOPS = 32 * (6 * 12 * 64 * 64 + 3 * 4 * 64 * 16.5)
HEAD_FLOPS = 32 * 6 * 256 * 64
FLOPS_PER_S = 1e9
NO_LINK_AT_ALL = 1e18


def facts(layout: Layout, **changes: object) -> PlanInput:
    plain = PlanInput(
        model=ModelFacts(shape=SHAPE, tied_embeddings=False),
        layout=layout,
        sequence_parallel=layout.tp > 1,
        recompute=("none",) * SHAPE.layers,
        micro_batch=1,
        global_batch=8 * layout.dp,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # fields of PlanInput


def machine(link: float, *, peer: float | None = None, ranks_per_node: int = 1) -> Machine:
    return Machine(
        peak_flops_per_s=2 * FLOPS_PER_S,
        kernel_share=0.5,
        peer_bytes_per_s=peer or link,
        link_bytes_per_s=link,
        ranks_per_node=ranks_per_node,
    )


def fast(layout: Layout, **changes: object) -> Projection:
    return project(facts(layout, **changes), machine(NO_LINK_AT_ALL))


def test_parts_of_a_step_add_up_and_slow_links_cost_time() -> None:
    job = facts(Layout(tp=2, pp=2, dp=2))
    quick, slow = (project(job, machine(link)) for link in (1e12, 1e6))
    for step in (quick, slow):
        exposed = step.tp_exposed_s + step.pp_exposed_s + step.dp_exposed_s
        assert step.step_s == pytest.approx(step.compute_s + step.bubble_s + exposed)
    assert slow.step_s > 2 * quick.step_s
    assert min(slow.tp_exposed_s, slow.pp_exposed_s, slow.dp_exposed_s) > 0
    assert quick.mfu_full > quick.mfu_windowed


@pytest.mark.parametrize("chunks", [1, 4])
def test_each_message_costs_the_time_until_it_begins(chunks: int) -> None:
    """Of the pieces of one, which hide behind products, the first does."""
    late_s, slow = 1e-4, replace(machine(NO_LINK_AT_ALL), latency_s=1e-4)
    tensor = project(facts(Layout(tp=2), tp_chunks=chunks), slow)
    # Four gathers and reduce-scatters a layer forward, six backward; and at the ends.
    assert tensor.tp_exposed_s == pytest.approx(8 * (8 * (4 + 6) + 5) * late_s)
    pipeline = project(facts(Layout(pp=4)), slow)
    assert pipeline.pp_exposed_s == pytest.approx(2 * 3 * late_s)
    replicas = project(facts(Layout(dp=2)), slow)
    assert replicas.dp_exposed_s == pytest.approx(late_s)
    shards = project(facts(Layout(dp=2), zero=ZeroFacts(level=1)), slow)
    assert shards.dp_exposed_s == pytest.approx(2 * late_s)
    swapped = project(facts(Layout(dp=2, cp=2), global_batch=8), slow)
    assert swapped.tp_exposed_s == pytest.approx(8 * 8 * 4 * late_s)


def test_one_rank_computes_at_the_share_of_its_peak() -> None:
    step = fast(Layout())
    assert step.step_s == pytest.approx(8 * (8 * BLOCK_FLOPS + HEAD_FLOPS) / FLOPS_PER_S)
    assert step.mfu_windowed == pytest.approx(0.5)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 8), (4, 2)])
def test_weight_gradients_fill_a_part_of_the_bubble(stages: int, micro_batches: int) -> None:
    """Against 1F1B it is shorter by twice the gradients of weights of all stages but one."""
    changes = {"global_batch": micro_batches, "schedule": "zb-h1"}
    plain, split = (
        fast(Layout(pp=stages), **{**changes, "schedule": name}) for name in ("1f1b", "zb-h1")
    )
    weights_s = 8 / stages * 32 * 2 * 12 * 64 * 64 / FLOPS_PER_S
    filled = stages - 1 + min(stages, micro_batches) - 1
    assert plain.bubble_s - split.bubble_s == pytest.approx(filled * weights_s)
    job = facts(Layout(pp=stages), **changes)
    assert least_step_s(job, machine(NO_LINK_AT_ALL)) <= split.step_s


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 8), (4, 6), (2, 1)])
def test_a_folded_pipeline_waits_as_its_schedule_does(stages: int, micro_batches: int) -> None:
    """For chunks that take equally long: half of the gradients of inputs, once it is full."""
    changes = {"global_batch": micro_batches, "schedule": "zb-v", "virtual_stages": 2}
    job = facts(Layout(pp=stages), **changes)
    step = fast(Layout(pp=stages), **changes)
    forward_s = 8 / stages * BLOCK_FLOPS / 3 / FLOPS_PER_S
    weights_s = 8 / stages * 32 * 2 * 12 * 64 * 64 / FLOPS_PER_S
    inputs_s = 2 * forward_s - weights_s
    if micro_batches >= 2 * stages:
        wait_s = max(inputs_s, 2 * (inputs_s - weights_s)) / 2
        assert step.bubble_s == pytest.approx((stages - 1) * wait_s)
    else:
        assert step.bubble_s > (stages - 1) * inputs_s / 2
    assert least_step_s(job, machine(NO_LINK_AT_ALL)) <= step.step_s


@pytest.mark.parametrize(
    ("split", "busiest"),
    [((4, 4), 4 * BLOCK_FLOPS + HEAD_FLOPS), ((6, 2), 6 * BLOCK_FLOPS)],
    ids=["head", "more_layers"],
)
def test_the_busiest_stage_decides_a_step(split: tuple[int, ...], busiest: float) -> None:
    """Every micro-batch waits for it; the other stage's time is the bubble."""
    step = fast(Layout(pp=2), layer_split=split)
    everything = 8 * BLOCK_FLOPS + HEAD_FLOPS
    assert step.compute_s == pytest.approx(8 * busiest / FLOPS_PER_S)
    assert step.bubble_s == pytest.approx((everything - busiest) / FLOPS_PER_S)


def test_recompute_counts_where_its_layers_are() -> None:
    last_only = ("none",) * 4 + ("full",) * 4
    step = fast(Layout(pp=2), recompute=last_only)
    # A forward pass once more.
    busiest = 4 * BLOCK_FLOPS * 4 / 3 + HEAD_FLOPS
    assert step.compute_s == pytest.approx(8 * busiest / FLOPS_PER_S)


def test_virtual_stages_shorten_the_bubble() -> None:
    plain = fast(Layout(pp=2))
    virtual = fast(Layout(pp=2), schedule="interleaved", virtual_stages=2)
    assert virtual.bubble_s == pytest.approx(plain.bubble_s / 2)


def zero_step(zero: ZeroFacts, share_of_a_pass: float) -> tuple[float, float]:
    """Exposed time and the time of one message, which lasts so long beside a micro-batch."""
    job = facts(Layout(dp=2), zero=zero)
    pass_s = (8 * BLOCK_FLOPS + HEAD_FLOPS) / FLOPS_PER_S
    message_s = share_of_a_pass * pass_s
    link = replica_messages(job, 0).gathered_bytes / message_s
    return project(job, machine(link)).dp_exposed_s / pass_s, message_s / pass_s


def test_messages_of_each_micro_batch_hide_behind_each_one() -> None:
    """A third of a pass is forward; what is longer than its pass shows."""
    each = ZeroFacts(level=3, reshards_each=True, reduces_each=True)
    assert zero_step(each, 0.3)[0] == 0
    sent = replica_messages(facts(Layout(dp=2), zero=each), 0)
    again = 0.5 * sent.gathered_again_bytes / sent.gathered_bytes
    # 8 forwards gather for a half; 8 backwards gather nearly as much, no embedding, and reduce
    # for a half beside two thirds.
    expected = 8 * (0.5 - 1 / 3) + 8 * (again + 0.5 - 2 / 3)
    assert zero_step(each, 0.5)[0] == pytest.approx(expected)


def test_messages_of_a_step_hide_behind_one_micro_batch() -> None:
    once = ZeroFacts(level=3)
    assert zero_step(once, 0.3)[0] == 0
    assert zero_step(once, 1.0)[0] == pytest.approx((1 - 1 / 3) + (1 - 2 / 3))
    # The first forward pass is the same at level 1; level 0 sums all beside the last backward.
    assert zero_step(ZeroFacts(level=1), 1.0) == zero_step(once, 1.0)
    assert zero_step(ZeroFacts(), 1.0)[0] == pytest.approx(2 - 2 / 3)


def test_reductions_of_each_micro_batch_hide_behind_its_backward_pass() -> None:
    each = ZeroFacts(level=2, reduces_each=True)
    assert zero_step(each, 0.6)[0] == pytest.approx(0.6 - 1 / 3)
    assert zero_step(each, 1.0)[0] == pytest.approx((1 - 1 / 3) + 8 * (1 - 2 / 3))


@pytest.mark.parametrize(
    ("layout", "ranks_per_node", "inside"),
    [
        (Layout(dp=8), 8, "tp pp dp"),
        (Layout(dp=8), 4, "tp pp"),
        (Layout(tp=2, dp=4), 8, "tp pp dp"),
        (Layout(tp=2, dp=4), 4, "tp pp"),
        (Layout(tp=2, dp=2, pp=2), 4, "tp dp"),
        (Layout(tp=2, dp=2, pp=2), 8, "tp pp dp"),
        (Layout(tp=4), 2, "pp dp"),
        (Layout(tp=3, dp=4), 4, "pp"),
    ],
)
def test_groups_inside_a_node_use_its_own_links(
    layout: Layout, ranks_per_node: int, inside: str
) -> None:
    shape = replace(SHAPE, hidden=96, heads=6, kv_heads=6, vocab_size=240, seq_len=36)
    job = facts(layout, model=ModelFacts(shape=shape, tied_embeddings=False))
    step = project(job, machine(1e6, peer=1e8, ranks_per_node=ranks_per_node))
    for name, speed in (
        ("tp", step.tp_bytes_per_s),
        ("pp", step.pp_bytes_per_s),
        ("dp", step.dp_bytes_per_s),
    ):
        assert speed == (1e8 if name in inside.split() else 1e6), name


@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4, 6, 8])
def test_links_are_those_that_the_groups_of_ranks_cross(ranks_per_node: int) -> None:
    """What follows from degrees alone is what looking at each group gives."""
    shape = replace(SHAPE, hidden=96, heads=12, kv_heads=12, vocab_size=240, seq_len=36)
    model = ModelFacts(shape=shape, tied_embeddings=False)
    for tp, pp, dp, part in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4), (1, 2)):
        if dp % part:
            continue
        layout = Layout(tp=tp, pp=pp, dp=dp, cp=part, ep=part)
        step = project(
            facts(layout, model=model), machine(1e6, peer=1e8, ranks_per_node=ranks_per_node)
        )
        for groups, speed in (
            (layout.tp_groups(), step.tp_bytes_per_s),
            (layout.pp_groups(), step.pp_bytes_per_s),
            (layout.dp_groups(), step.dp_bytes_per_s),
            (layout.cp_groups(), step.cp_bytes_per_s),
            (layout.ep_groups(), step.ep_bytes_per_s),
        ):
            nodes = [{rank // ranks_per_node for rank in group} for group in groups]
            inside = all(len(each) == 1 for each in nodes)
            assert speed == (1e8 if inside else 1e6), (layout, ranks_per_node)


def test_recompute_is_work_of_the_hardware_and_not_of_the_model() -> None:
    plain, full = (fast(Layout(), recompute=(mode,) * 8) for mode in ("none", "full"))
    assert (plain.recompute_s, plain.hfu_windowed) == (0, pytest.approx(plain.mfu_windowed))
    assert full.hfu_windowed == pytest.approx(0.5)
    assert full.mfu_windowed == pytest.approx(0.5 * plain.step_s / full.step_s)
    # A third forward pass of the blocks; the head is not computed again.
    assert full.recompute_s == pytest.approx(8 * 8 * BLOCK_FLOPS / 3 / FLOPS_PER_S)


def test_messages_between_stages_that_are_longer_than_a_pass_show() -> None:
    """Two chunks of each stage: inner stages send four messages for each micro-batch."""
    job = facts(Layout(pp=4), schedule="interleaved", virtual_stages=2)
    pass_s = (2 * BLOCK_FLOPS) / FLOPS_PER_S
    for share, shown in ((0.2, 0.0), (0.5, 8 * (4 * 0.5 - 1))):
        link = message_bytes(job) / (share * pass_s)
        step = project(job, machine(link))
        assert step.pp_exposed_s / pass_s == pytest.approx(6 * share + shown)


def test_chunks_hide_messages_of_a_step_behind_rounds_of_other_chunks() -> None:
    """Only the part of the chunk that comes first, or last, has its own pass alone."""
    chunks = {"schedule": "interleaved", "virtual_stages": 2}
    plain, virtual = (facts(Layout(pp=2, dp=2), **more) for more in ({}, chunks))
    link = replica_messages(plain, 0).reduced_bytes / (4 * BLOCK_FLOPS / FLOPS_PER_S)
    shown, hidden = (project(job, machine(link)).dp_exposed_s for job in (plain, virtual))
    assert hidden == pytest.approx(shown / 2)


def test_a_tied_table_is_summed_after_everything_else() -> None:
    tied, untied = (
        facts(Layout(pp=2), model=ModelFacts(shape=SHAPE, tied_embeddings=tied))
        for tied in (True, False)
    )
    longer_s = project(tied, machine(1e6)).pp_exposed_s - project(untied, machine(1e6)).pp_exposed_s
    assert longer_s == pytest.approx(embedding_bytes(tied) / 1e6)
