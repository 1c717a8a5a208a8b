"""A projected step: what decides it, what hides, and which link each dimension uses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outlast.flops import ModelShape
from outlast.layout import Layout
from outlast.sizing.parameters import ModelFacts, PlanInput, ZeroFacts
from trainer.core.projection import Machine, Projection, project
from trainer.core.traffic import embedding_bytes, replica_messages

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


def test_one_rank_computes_at_the_share_of_its_peak() -> None:
    step = fast(Layout())
    assert step.step_s == pytest.approx(8 * (8 * BLOCK_FLOPS + HEAD_FLOPS) / FLOPS_PER_S)
    assert step.mfu_windowed == pytest.approx(0.5)


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


def test_a_tied_table_is_summed_after_everything_else() -> None:
    tied, untied = (
        facts(Layout(pp=2), model=ModelFacts(shape=SHAPE, tied_embeddings=tied))
        for tied in (True, False)
    )
    longer_s = project(tied, machine(1e6)).pp_exposed_s - project(untied, machine(1e6)).pp_exposed_s
    assert longer_s == pytest.approx(embedding_bytes(tied) / 1e6)
