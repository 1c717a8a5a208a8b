"""Blends of sources: every weight is kept at every step, whatever the layout."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.core.batch import BlendPlan
from trainer.core.blend import Blend, Pattern, Stage

WEIGHTS = st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any)


@given(WEIGHTS)
def test_no_source_is_ever_a_whole_sample_off_its_weight(weights: list[int]) -> None:
    pattern = Pattern(weights)
    taken = [0] * len(weights)
    for position in range(2 * pattern.period):
        assert taken == pattern.before(position)
        source, earlier = pattern.at(position)
        assert earlier == taken[source]
        taken[source] += 1
        for had, weight in zip(taken, weights, strict=True):
            # Exact: |had - (position + 1) x weight / sum| < 1.
            assert abs(had * sum(weights) - (position + 1) * weight) < sum(weights)


@settings(max_examples=20)
@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=7))
def test_any_weights_make_a_bounded_period(weights: list[float]) -> None:
    pattern = Pattern(weights)
    assert pattern.period <= 2**16
    assert min(pattern.counts) >= 1
    for count, weight in zip(pattern.counts, weights, strict=True):
        assert abs(count / pattern.period - weight / sum(weights)) < len(weights) / 2**16


def test_simple_weights_are_exact() -> None:
    assert Pattern([0.7, 0.3]).counts == (7, 3)
    assert Pattern([5, 0, 5]).counts == (1, 0, 1)
    with pytest.raises(ValueError, match="nor all zero"):
        Pattern([0.0, 0.0])


@given(WEIGHTS, st.integers(1, 40), st.integers(1, 40), st.data())
def test_no_sample_is_left_out_or_repeated_where_weights_change(
    weights: list[int], first: int, second: int, data: st.DataObject
) -> None:
    size = len(weights)
    others = [
        data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size).filter(any))
        for _ in range(2)
    ]
    positions = (0, first, first + second)
    blend = Blend(
        [
            Stage(first_position=position, weights=tuple(each))
            for position, each in zip(positions, (weights, *others), strict=True)
        ]
    )
    taken: Counter[int] = Counter()
    for position in range(first + second + 50):
        assert blend.before(position) == [taken[source] for source in range(size)]
        source, earlier = blend.at(position)
        assert earlier == taken[source]
        taken[source] += 1


def plan(replicas: int, micro_batch: int, sizes: tuple[int, ...] = (50, 7)) -> BlendPlan:
    stages = [Stage(first_position=0, weights=(0.7, 0.3)), Stage(first_position=48, weights=(1, 3))]
    return BlendPlan(
        global_batch=12,
        micro_batch=micro_batch,
        num_replicas=replicas,
        seed=3,
        blend=Blend(stages),
        num_samples=sizes,
    )


@pytest.mark.parametrize(("replicas", "micro_batch"), [(1, 12), (2, 3), (4, 1), (6, 2)])
def test_every_layout_sees_the_same_batch(replicas: int, micro_batch: int) -> None:
    cut, whole = plan(replicas, micro_batch), plan(1, 1)
    for step in range(1, 10):
        parts = [
            sample
            for replica in range(replicas)
            for index in range(cut.num_micro_batches)
            for sample in cut.samples(step, replica, index)
        ]
        assert parts == [whole.samples(step, 0, index)[0] for index in range(12)]


def test_each_source_is_passed_over_before_any_of_it_comes_again() -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}
    for step in range(1, 40):
        for source, sample in plan(1, 12).samples(step, 0, 0):
            seen[source].append(sample)
    assert sorted(seen[0][:50]) == list(range(50))
    for begin in range(0, 35, 7):
        assert sorted(seen[1][begin : begin + 7]) == list(range(7))
    assert seen[1][:7] != seen[1][7:14]


def test_a_billion_samples_take_no_list() -> None:
    large = plan(1, 12, sizes=(10**9, 10**9))
    samples = large.samples(10**12, 0, 0)
    assert {source for source, _ in samples} == {0, 1}
    assert all(0 <= sample < 10**9 for _, sample in samples)
