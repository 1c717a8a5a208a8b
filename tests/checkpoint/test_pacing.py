from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.core.manifest import BLOCK_BYTES
from checkpoint.core.pacing import (
    MAX_PARALLEL,
    PART_BYTES,
    Cadence,
    Pace,
    TransferLimits,
    backoff_s,
)

# The machine may be busy: the time of one example says nothing.
few = settings(max_examples=100, deadline=None)
limits = st.builds(
    TransferLimits,
    memory_bytes=st.integers(8 << 20, 1 << 30),
    bytes_per_s=st.none() | st.floats(1 << 20, 1e10),
)


@few
@given(limits=limits, nbytes=st.integers(0, 1 << 42))
def test_parts_suit_checksums_and_s3(limits: TransferLimits, nbytes: int) -> None:
    size = limits.part_bytes(nbytes)
    assert size % BLOCK_BYTES == 0
    # S3: from 5 MiB on, at most 10,000 of them.
    assert size >= 5 << 20
    assert -(-nbytes // size) <= 10_000


@few
@given(limits=limits, nbytes=st.integers(0, 10_000 * PART_BYTES))
def test_parts_on_their_way_fit_into_the_budget(limits: TransferLimits, nbytes: int) -> None:
    parallel = limits.num_parallel(nbytes)
    assert 1 <= parallel <= MAX_PARALLEL
    size = limits.part_bytes(nbytes)
    # A single part may have to be larger: a file has 10,000 at most.
    assert parallel == 1 or parallel * size <= limits.memory_bytes


def test_smaller_budget_keeps_parts_side_by_side() -> None:
    small = TransferLimits(memory_bytes=32 << 20)
    assert (small.part_bytes(1 << 30), small.num_parallel(1 << 30)) == (8 << 20, MAX_PARALLEL)


@few
@given(
    bytes_per_s=st.floats(1.0, 1e9),
    parts=st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 100)), max_size=30),
)
def test_pace_never_exceeds_the_budget(bytes_per_s: float, parts: list[tuple[int, float]]) -> None:
    pace = Pace(bytes_per_s)
    now_s, sent, ends_s = 0.0, 0, 0.0
    for nbytes, gap_s in parts:
        now_s += gap_s
        start_s = now_s + pace.delay_s(nbytes, now_s)
        # All before this part has had the time that the budget gives it.
        assert start_s >= sent / bytes_per_s - 1e-6 * (1 + sent / bytes_per_s)
        assert start_s >= ends_s - 1e-6 * (1 + ends_s)
        sent += nbytes
        ends_s = start_s + nbytes / bytes_per_s


def test_no_budget_is_no_wait() -> None:
    pace = Pace(None)
    assert [pace.delay_s(1 << 40, 0.0) for _ in range(3)] == [0.0, 0.0, 0.0]


def test_backoff_doubles_and_ends_growing() -> None:
    assert [backoff_s(failures, 1.0) for failures in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert backoff_s(1, 0.0) == 0.25
    assert backoff_s(1000, 1.0) == backoff_s(20, 1.0) == 30.0


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([50, 100, 150, 200], False),
        ([50, 100, 163, 200], False),  # one late upload is chance
        ([50, 113, 176, 239], True),
        ([50, 150, 250, 350], True),  # every second one is left out
        ([50, 113, 176, 200], False),  # it has caught up
        ([50, 113, 50, 100], False),  # a restart went back
    ],
)
def test_storage_is_behind_when_uploads_are_late_in_a_row(steps: list[int], expected: bool) -> None:
    cadence = Cadence(50)
    found = [cadence.is_behind_after(step, 60.0 * index) for index, step in enumerate(steps)]
    assert found[-1] is expected


def test_storage_that_is_behind_for_seconds_is_no_incident() -> None:
    cadence = Cadence(50)
    assert not any(cadence.is_behind_after(step, step / 10) for step in (50, 113, 176, 239, 302))


def test_last_step_of_a_job_is_no_sign_of_slowness() -> None:
    cadence = Cadence(50)
    assert not any(cadence.is_behind_after(step, 60.0 * step) for step in (50, 100, 120))
