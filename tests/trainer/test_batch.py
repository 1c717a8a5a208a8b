"""Data order: a permutation, a function of the step, the same for every layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.core.batch import BatchPlan, permuted


def _global_batch(plan: BatchPlan, step: int) -> list[int]:
    return [
        sample
        for replica in range(plan.num_replicas)
        for micro_batch in range(plan.num_micro_batches)
        for sample in plan.samples(step, replica, micro_batch)
    ]


def _plan(
    *, replicas: int = 1, micro_batch: int = 1, samples: int = 40, seed: int = 5
) -> BatchPlan:
    return BatchPlan(
        num_samples=samples,
        global_batch=8,
        micro_batch=micro_batch,
        num_replicas=replicas,
        seed=seed,
    )


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
def test_every_index_goes_to_exactly_one_place(size: int, key: int) -> None:
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_a_pass_visits_every_sample_once_and_passes_differ() -> None:
    plan = _plan()
    first = [s for step in range(1, 6) for s in _global_batch(plan, step)]
    second = [s for step in range(6, 11) for s in _global_batch(plan, step)]
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second != list(range(40))


@given(
    replicas=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2]),
    step=st.integers(1, 99),
)
def test_every_layout_reads_the_same_global_batch(
    replicas: int, micro_batch: int, step: int
) -> None:
    other = _plan(replicas=replicas, micro_batch=micro_batch)
    assert _global_batch(other, step) == _global_batch(_plan(), step)


def test_the_seed_decides_the_order() -> None:
    assert _global_batch(_plan(seed=5), 1) == _global_batch(_plan(seed=5), 1)
    assert _global_batch(_plan(seed=5), 1) != _global_batch(_plan(seed=6), 1)


def test_the_order_is_pinned() -> None:
    """Changing it would break the resume of every running job."""
    assert [permuted(i, 10, 42) for i in range(10)] == PINNED


PINNED = [4, 6, 5, 2, 8, 0, 9, 1, 7, 3]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple of 3 replicas x micro-batch 1"):
        _plan(replicas=3)
    with pytest.raises(ValueError, match="no whole sample"):
        _plan(samples=0)
