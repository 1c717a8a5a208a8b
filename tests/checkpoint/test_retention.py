from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.core.retention import AttemptFolder, is_abandoned, plan_cleanup

# The machine may be busy: the time of one example says nothing.
few = settings(max_examples=60, deadline=None)

folder_sets = st.sets(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=12)


def folder(step: int, attempt: int = 1) -> AttemptFolder:
    return AttemptFolder(step=step, attempt=attempt)


@few
@given(
    committed=st.dictionaries(st.integers(0, 9), st.none() | st.integers(1, 3)),
    folders=folder_sets,
    quarantined=folder_sets,
    keep=st.integers(1, 4),
)
def test_what_is_kept_or_may_still_be_committed_is_never_touched(
    committed: dict[int, int | None],
    folders: set[tuple[int, int]],
    quarantined: set[tuple[int, int]],
    keep: int,
) -> None:
    plan = plan_cleanup(
        committed,
        [folder(*one) for one in sorted(folders)],
        keep=keep,
        quarantined=quarantined,
    )
    newest_first = sorted(committed, reverse=True)
    assert list(plan.delete_steps) == sorted(newest_first[keep:])
    for swept in plan.sweep:
        assert swept.step < newest_first[0]
        assert (swept.step, swept.attempt) not in quarantined
        if swept.step in committed:
            assert committed[swept.step] not in (None, swept.attempt)


def test_loser_of_a_race_is_swept_and_the_winner_is_not() -> None:
    plan = plan_cleanup({10: 2, 20: 3}, [folder(10, 1), folder(10, 2), folder(20, 3)], keep=2)
    assert plan.delete_steps == ()
    assert plan.sweep == (folder(10, 1),)


def test_nothing_is_deleted_before_there_is_a_checkpoint() -> None:
    plan = plan_cleanup({}, [folder(10), folder(20)], keep=2)
    assert plan.delete_steps == ()
    assert plan.sweep == ()


def test_keeping_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        plan_cleanup({1: 1}, [], keep=0)


@pytest.mark.parametrize(
    ("written_at_s", "oldest_kept", "expected"),
    [
        ([100.0, 160.0], 9, False),  # somebody wrote 40 s ago
        ([100.0, 120.0], 9, True),
        ([100.0, None], 9, True),  # the store gives no times: older than all that is kept
        ([100.0, None], 5, False),
        ([], 9, True),
        ([], 3, False),
    ],
)
def test_folder_is_abandoned_only_when_nobody_can_be_writing(
    written_at_s: list[float | None], oldest_kept: int, expected: bool
) -> None:
    abandoned = is_abandoned(
        folder(5), written_at_s=written_at_s, now_s=200.0, grace_s=60.0, oldest_kept=oldest_kept
    )
    assert abandoned is expected
