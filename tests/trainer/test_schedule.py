"""Schedules do all the work in an order that can run, and cost what the papers say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.sizing.partition import split_layers
from trainer.core.schedule import (
    NAMES,
    Action,
    ActionKind,
    Schedule,
    ScheduleError,
    bubble_over_work,
    bubble_share,
    build,
    check,
    zero_bubble_share,
    zero_bubble_v_share,
)

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
BI, BW = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT

stages = st.integers(1, 8)
micro_batches = st.integers(1, 24)
chunks = st.integers(2, 4)
# How long an example takes is not what these tests are about.
unhurried = settings(deadline=None)


def _actions(*pairs: tuple[ActionKind, int]) -> tuple[Action, ...]:
    return tuple(Action(kind=kind, micro_batch=index) for kind, index in pairs)


@given(name=st.sampled_from(("gpipe", "1f1b")), p=stages, m=micro_batches)
def test_bubble_is_the_papers(name: str, p: int, m: int) -> None:
    """Both schedules idle (p - 1) / (m + p - 1) of the time (GPipe, section 2.3)."""
    assert check(build(name, p, m)).bubble == pytest.approx(bubble_share(p, m))


@unhurried
@given(p=st.integers(2, 8), v=chunks, m=micro_batches)
def test_interleaving_cuts_the_bubble_by_the_number_of_chunks(p: int, v: int, m: int) -> None:
    """(p - 1) / (v m + p - 1) where a round fills the pipeline (arXiv 2104.04473, 2.2).

    Theory and the proof inside `check` hold for every m: those that p does not
    divide, and those that do not even fill the pipeline.
    """
    timing = check(build("interleaved", p, m, num_chunks=v))
    assert timing.bubble == pytest.approx(bubble_share(p, m, v))
    if m >= p:
        assert timing.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@unhurried
@given(p=st.integers(2, 8), v=chunks, rounds=st.integers(1, 4))
def test_interleaving_holds_what_its_warm_up_says(p: int, v: int, rounds: int) -> None:
    """Stage r warms up with 2 (p - r - 1) + (v - 1) p forwards (Megatron-LM)."""
    m = rounds * p
    found = check(build("interleaved", p, m, num_chunks=v)).peak_in_flight
    assert found == tuple(min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p))
    if rounds > 1:
        # Against 1F1B's p whole stages: 1 + (p - 1) / (p v) (arXiv 2205.05198).
        assert found[0] / (v * p) == pytest.approx(1 + (p - 1) / (p * v))


@pytest.mark.parametrize(
    ("p", "m", "v", "share"),
    [
        (2, 8, 1, 0.111),
        (2, 8, 2, 0.059),
        (4, 16, 1, 0.158),
        (4, 16, 2, 0.086),
        (8, 16, 1, 0.304),
        (8, 16, 2, 0.180),
    ],
)
def test_golden_bubbles(p: int, m: int, v: int, share: float) -> None:
    """As measured runs of torch's schedules were compared with, to three digits."""
    schedule = build("1f1b" if v == 1 else "interleaved", p, m, num_chunks=v)
    assert bubble_share(p, m, v) == pytest.approx(share, abs=6e-4)
    assert check(schedule).bubble == pytest.approx(share, abs=6e-4)


def test_golden_bubble_of_the_largest_job_in_the_megascale_paper() -> None:
    """12,288 GPUs: 8 stages of 6 chunks; 32 micro-batches if one holds one sequence."""
    assert round(100 * bubble_over_work(8, 32), 1) == 21.9
    assert round(100 * bubble_over_work(8, 32, 6), 1) == 3.6


@given(p=st.integers(2, 8), m=micro_batches, extra=st.integers(1, 3))
def test_extra_warm_up_costs_as_many_live_micro_batches(p: int, m: int, extra: int) -> None:
    plain, ahead = check(build("1f1b", p, m)), check(build("1f1b", p, m, extra_warmup=extra))
    assert ahead.bubble == pytest.approx(plain.bubble)
    assert ahead.peak_in_flight[:-1] == tuple(min(m, p - r + extra) for r in range(p - 1))
    assert ahead.peak_in_flight[-1] == 1


@given(p=stages, m=micro_batches)
def test_1f1b_holds_no_more_than_its_depth_in_flight(p: int, m: int) -> None:
    timing = check(build("1f1b", p, m))
    assert timing.peak_in_flight == tuple(min(m, p - stage) for stage in range(p))


@unhurried
@given(p=stages, m=micro_batches, inputs=st.floats(1, 4), weights=st.floats(0.1, 1))
def test_zero_bubble_is_as_short_as_the_papers(
    p: int, m: int, inputs: float, weights: float
) -> None:
    """(p - 1)(F + B - W) beside 1F1B's (p - 1)(F + B + W) (arXiv 2401.10241, 2.3).

    With fewer micro-batches than stages there are fewer W's, and the theory says how many.
    """
    costs = {F: 1.0, BI: inputs, BW: weights, B: inputs + weights}
    work = m * (1 + inputs + weights)
    found, plain = (check(build(name, p, m), costs) for name in ("zb-h1", "1f1b"))
    assert found.bubble == pytest.approx(zero_bubble_share(p, m, costs))
    assert plain.makespan - work == pytest.approx((p - 1) * (1 + inputs + weights))
    if m >= p:
        assert found.makespan - work == pytest.approx((p - 1) * (1 + inputs - weights))


@unhurried
@given(
    p=stages,
    m=micro_batches,
    forward=st.floats(0.5, 1),
    inputs=st.floats(1, 4),
    weights=st.floats(0.1, 0.5),
)
def test_a_folded_pipeline_waits_for_its_first_micro_batch_only(
    p: int, m: int, forward: float, inputs: float, weights: float
) -> None:
    """ZB-V idles (p - 1) max(B, 2 (B - W)), B and W of a chunk, once it is full."""
    costs = {F: forward, BI: inputs, BW: weights, B: inputs + weights}
    found = check(build("zb-v", p, m, num_chunks=2), costs)
    idle_share = found.bubble / (1 - found.bubble)
    share = zero_bubble_v_share(p, m, costs)
    assert share / (1 - share) == pytest.approx(idle_share, rel=0.1)
    if m >= 2 * p:
        assert share == pytest.approx(found.bubble)
        idle = found.makespan - 2 * m * (forward + inputs + weights)
        assert idle == pytest.approx((p - 1) * max(inputs, 2 * (inputs - weights)))


@given(p=stages, m=micro_batches)
def test_a_folded_pipeline_idles_least_and_holds_what_1f1b_does(p: int, m: int) -> None:
    """Where all parts take equally long: a sixth of 1F1B's time, half of ZB-H1's."""
    found = check(build("zb-v", p, m, num_chunks=2))
    assert max(found.peak_in_flight) <= 2 * check(build("1f1b", p, max(m, p))).peak_in_flight[0]
    if m >= 2 * p:
        # A chunk takes half of what a stage of these takes.
        others = (check(build(name, p, m)) for name in ("1f1b", "zb-h1"))
        idle, split_idle = (one.makespan - 3 * m for one in others)
        assert (
            (found.makespan - 6 * m) / 2 == pytest.approx(idle / 6) == pytest.approx(split_idle / 2)
        )
        assert found.peak_in_flight == (2 * p,) * p


@given(p=stages, m=micro_batches, inputs=st.integers(1, 3))
def test_theory_of_a_folded_pipeline_is_exact_with_equal_parts(p: int, m: int, inputs: int) -> None:
    """As plans have it: recompute is a part of B, and F and W are equal."""
    costs = {F: 1.0, BI: float(inputs), BW: 1.0, B: inputs + 1.0}
    found = check(build("zb-v", p, m, num_chunks=2), costs)
    assert found.bubble == pytest.approx(zero_bubble_v_share(p, m, costs))


@given(p=stages, m=micro_batches)
def test_a_folded_pipeline_adds_up_in_the_order_of_micro_batches(p: int, m: int) -> None:
    """So that sums of gradients have 1F1B's bits."""
    for work in build("zb-v", p, m, num_chunks=2).actions:
        for kind in (F, BI, BW):
            for chunk in (0, 1):
                order = [a.micro_batch for a in work if (a.kind, a.chunk) == (kind, chunk)]
                assert order == list(range(m))


def test_a_folded_pipeline_of_two_stages_reads_as_in_the_paper() -> None:
    """Small letters are of the second chunk, which is on the way back."""
    first, last = build("zb-v", 2, 4, num_chunks=2).actions
    assert " ".join(map(_short, first)) == (
        "F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3"
    )
    assert " ".join(map(_short, last)) == (
        "F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3"
    )


def _short(action: Action) -> str:
    letter = {F: "F", BI: "B", BW: "W"}[action.kind]
    return f"{letter.lower() if action.chunk else letter}{action.micro_batch}"


@given(p=stages, m=micro_batches)
def test_zero_bubble_holds_what_1f1b_does(p: int, m: int) -> None:
    """Whole micro-batches as 1F1B on every stage, any part of them as 1F1B on its first."""
    found, plain = check(build("zb-h1", p, m)), check(build("1f1b", p, m))
    assert found.peak_whole == plain.peak_whole == plain.peak_in_flight
    assert found.peak_in_flight == (plain.peak_in_flight[0],) * p


@given(p=stages, m=micro_batches)
def test_zero_bubble_adds_up_in_the_order_of_1f1b(p: int, m: int) -> None:
    """So that sums of gradients have its bits."""
    for work, plain in zip(build("zb-h1", p, m).actions, build("1f1b", p, m).actions, strict=True):
        for kind, as_in in ((F, F), (BI, B), (BW, B)):
            order = [action.micro_batch for action in work if action.kind is kind]
            assert order == [action.micro_batch for action in plain if action.kind is as_in]


def test_zero_bubble_of_two_stages_reads_as_in_the_paper() -> None:
    first, last = build("zb-h1", 2, 3).actions
    assert first == _actions(
        (F, 0), (F, 1), (BI, 0), (BW, 0), (F, 2), (BI, 1), (BW, 1), (BI, 2), (BW, 2)
    )
    assert last == _actions(
        (F, 0), (BI, 0), (F, 1), (BI, 1), (BW, 0), (F, 2), (BI, 2), (BW, 1), (BW, 2)
    )


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (((F, 0), (BW, 0), (BI, 0)), "waits for ever at backward_weight of micro-batch 0"),
        (((F, 0), (BI, 0)), "stage 0 does .* expected a forward and one whole backward"),
        (((F, 0), (BI, 0), (BW, 0), (BW, 0)), "stage 0 repeats an action"),
        (((F, 0), (B, 0), (BW, 0)), "expected a forward and one whole backward"),
    ],
)
def test_a_wrong_split_is_found(actions: tuple[tuple[ActionKind, int], ...], message: str) -> None:
    schedule = Schedule(
        name="wrong", num_stages=1, num_micro_batches=1, actions=(_actions(*actions),)
    )
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


@given(p=stages, m=micro_batches)
def test_gpipe_holds_everything_in_flight(p: int, m: int) -> None:
    assert check(build("gpipe", p, m)).peak_in_flight == (m,) * p


@given(p=st.integers(2, 5), m=st.integers(1, 8), data=st.data())
def test_any_missing_action_is_found(p: int, m: int, data: st.DataObject) -> None:
    schedule = build("1f1b", p, m)
    stage = data.draw(st.integers(0, p - 1))
    index = data.draw(st.integers(0, 2 * m - 1))
    cut = schedule.actions[stage][:index] + schedule.actions[stage][index + 1 :]
    broken = replace(
        schedule, actions=(*schedule.actions[:stage], cut, *schedule.actions[stage + 1 :])
    )
    with pytest.raises(ScheduleError, match=f"stage {stage} does"):
        check(broken)


def test_1f1b_of_two_stages_reads_as_in_the_paper() -> None:
    first, last = build("1f1b", 2, 3).actions
    assert first == _actions((F, 0), (F, 1), (B, 0), (F, 2), (B, 1), (B, 2))
    assert last == _actions((F, 0), (B, 0), (F, 1), (B, 1), (F, 2), (B, 2))


def test_backward_before_its_forward_deadlocks() -> None:
    schedule = Schedule(
        name="wrong", num_stages=1, num_micro_batches=1, actions=(_actions((B, 0), (F, 0)),)
    )
    with pytest.raises(ScheduleError, match="waits for ever at backward of micro-batch 0"):
        check(schedule)


def test_stages_that_wait_for_each_other_are_found() -> None:
    """Stage 0 wants a gradient before it has sent all that stage 1 wants first."""
    schedule = Schedule(
        name="crossed",
        num_stages=2,
        num_micro_batches=2,
        actions=(
            _actions((F, 0), (B, 0), (F, 1), (B, 1)),
            _actions((F, 0), (F, 1), (B, 0), (B, 1)),
        ),
    )
    with pytest.raises(ScheduleError, match="waits for ever"):
        check(schedule)


def test_repeated_and_foreign_actions_are_found() -> None:
    one = Schedule(
        name="twice", num_stages=1, num_micro_batches=1, actions=(_actions((F, 0), (F, 0), (B, 0)),)
    )
    with pytest.raises(ScheduleError, match="repeats"):
        check(one)
    other = replace(one, actions=(_actions((F, 0), (B, 0), (F, 1)),))
    with pytest.raises(ScheduleError, match="outside"):
        check(other)


def test_split_backward_lets_weight_gradients_fill_the_bubble() -> None:
    """Zero Bubble (arXiv 2401.10241): the weight part waits for nobody downstream."""
    fused = check(build("1f1b", 2, 2))
    split = Schedule(
        name="split",
        num_stages=2,
        num_micro_batches=2,
        actions=(
            _actions((F, 0), (F, 1), (BI, 0), (BW, 0), (BI, 1), (BW, 1)),
            _actions((F, 0), (BI, 0), (F, 1), (BI, 1), (BW, 0), (BW, 1)),
        ),
    )
    timing = check(split)
    assert timing.bubble < fused.bubble
    # The last stage puts its weight gradients off and pays with activations.
    assert timing.peak_in_flight == (2, 2)


def test_chunks_are_checked_across_the_wrap() -> None:
    """Two chunks on two stages: position 2 of the model is chunk 1 on stage 0."""

    def work(order: list[tuple[ActionKind, int]]) -> tuple[Action, ...]:
        return tuple(Action(kind=kind, micro_batch=0, chunk=chunk) for kind, chunk in order)

    right = work([(F, 0), (F, 1), (B, 1), (B, 0)])
    schedule = Schedule(
        name="looped", num_stages=2, num_micro_batches=1, num_chunks=2, actions=(right, right)
    )
    assert check(schedule).bubble == pytest.approx(0.5)
    wrong = work([(F, 1), (F, 0), (B, 1), (B, 0)])
    with pytest.raises(ScheduleError, match="stage 0 waits for ever at forward"):
        check(replace(schedule, actions=(wrong, right)))


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=", ".join(NAMES)):
        build("zero-bubble", 2, 2)


def test_knobs_that_a_schedule_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match="1f1b runs 1 chunk per stage, not 2"):
        build("1f1b", 2, 4, num_chunks=2)
    with pytest.raises(ValueError, match="needs 2 stages and 2 chunks per stage or more"):
        build("interleaved", 1, 4, num_chunks=2)
    with pytest.raises(ValueError, match="gpipe takes no extra warm-up"):
        build("gpipe", 2, 4, extra_warmup=1)
    with pytest.raises(ValueError, match="zb-v runs 2 chunks per stage, not 1"):
        build("zb-v", 2, 4)


@given(layers=st.integers(1, 100), data=st.data())
def test_every_layer_is_on_one_stage_and_sizes_differ_by_one(
    layers: int, data: st.DataObject
) -> None:
    parts = split_layers(layers, data.draw(st.integers(1, layers)))
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="2 layers cannot fill 3 parts"):
        split_layers(2, 3)
