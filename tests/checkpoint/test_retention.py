from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.core.retention import (
    AttemptFolder,
    CommittedStep,
    RetentionPolicy,
    is_abandoned,
    is_lease_held,
    kept_steps,
    plan_cleanup,
)

# The machine may be busy: the time of one example says nothing.
few = settings(max_examples=100, deadline=None)

folder_sets = st.sets(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=12)
policies = st.builds(
    RetentionPolicy,
    keep=st.integers(1, 4),
    spacing_steps=st.integers(1, 4),
    every_steps=st.none() | st.integers(1, 5),
    best=st.integers(0, 3),
)
metrics = st.none() | st.floats(allow_nan=True, allow_infinity=True)
histories = st.lists(
    st.builds(
        CommittedStep,
        step=st.integers(0, 12),
        attempt=st.none() | st.integers(1, 3),
        metric=metrics,
        is_pinned=st.booleans(),
        is_read=st.booleans(),
    ),
    max_size=10,
    unique_by=lambda one: one.step,
)


def folder(step: int, attempt: int = 1) -> AttemptFolder:
    return AttemptFolder(step=step, attempt=attempt)


def plain(*steps: int) -> list[CommittedStep]:
    return [CommittedStep(step=step, attempt=1) for step in steps]


@few
@given(committed=histories, policy=policies)
def test_every_reason_to_keep_a_checkpoint_holds(
    committed: list[CommittedStep], policy: RetentionPolicy
) -> None:
    kept = kept_steps(committed, policy)
    deleted = set(plan_cleanup(committed, [], policy).delete_steps)
    assert deleted.isdisjoint(kept)
    whole = sorted((one.step for one in committed if one.attempt is not None), reverse=True)
    # The newest that can be loaded are never deleted, however many damaged ones are newer.
    assert deleted.isdisjoint(whole[: policy.keep])
    for one in committed:
        if one.is_pinned or one.is_read:
            assert one.step not in deleted
        if policy.every_steps is not None and one.step % policy.every_steps == 0:
            assert one.step not in deleted
    if not whole:
        assert not deleted


@few
@given(committed=histories, policy=policies)
def test_what_no_reason_keeps_is_deleted(
    committed: list[CommittedStep], policy: RetentionPolicy
) -> None:
    kept = kept_steps(committed, policy)
    whole = [one for one in committed if one.attempt is not None]
    unasked = [
        one
        for one in whole
        if one.step in kept
        and not (one.is_pinned or one.is_read)
        and (policy.every_steps is None or one.step % policy.every_steps)
    ]
    most = policy.keep if policy.spacing_steps == 1 else 2 * policy.keep
    assert len(unasked) <= most + policy.best


@few
@given(
    gaps=st.lists(st.integers(1, 30), min_size=1, max_size=30), policy=policies, ago=st.integers(0)
)
def test_one_is_kept_that_is_as_old_as_a_rollback_may_want_it(
    gaps: list[int], policy: RetentionPolicy, ago: int
) -> None:
    """However soon one comes after another: a stop makes a checkpoint of its own."""
    wanted = ago % ((policy.keep - 1) * policy.spacing_steps + 1)
    committed: list[CommittedStep] = []
    was_old_enough = False
    for step in accumulate(gaps):
        committed += plain(step)
        gone = plan_cleanup(committed, [], policy).delete_steps
        committed = [one for one in committed if one.step not in gone]
        was_old_enough = was_old_enough or step - gaps[0] >= wanted
        assert not was_old_enough or any(one.step <= step - wanted for one in committed)


@few
@given(committed=histories, policy=policies, steps=st.data())
def test_deleting_in_two_rounds_deletes_no_more_than_in_one(
    committed: list[CommittedStep], policy: RetentionPolicy, steps: st.DataObject
) -> None:
    """A crash between two deletions changes nothing about what stays."""
    deleted = plan_cleanup(committed, [], policy).delete_steps
    gone = steps.draw(st.sets(st.sampled_from(deleted))) if deleted else set()
    rest = [one for one in committed if one.step not in gone]
    assert kept_steps(rest, policy) == kept_steps(committed, policy)


@few
@given(committed=histories, policy=policies, folders=folder_sets, busy=folder_sets)
def test_no_folder_that_a_commit_may_name_is_swept(
    committed: list[CommittedStep],
    policy: RetentionPolicy,
    folders: set[tuple[int, int]],
    busy: set[tuple[int, int]],
) -> None:
    plan = plan_cleanup(committed, [folder(*one) for one in sorted(folders)], policy, busy=busy)
    named = {one.step: one.attempt for one in committed}
    for swept in plan.sweep:
        assert (swept.step, swept.attempt) not in busy
        assert named.get(swept.step, -1) not in (None, swept.attempt)


def test_checkpoint_of_a_stop_takes_no_older_ones_place() -> None:
    policy = RetentionPolicy(keep=3, spacing_steps=50)
    assert kept_steps(plain(100, 150, 200, 250), policy) == {150, 200, 250}
    assert kept_steps(plain(100, 150, 200, 250, 277), policy) == {277, 250, 200} | {277, 200, 150}


def test_best_are_kept_beyond_the_newest() -> None:
    losses = {10: 2.0, 20: 1.0, 30: 1.5, 40: math.nan, 50: 3.0, 60: None}
    committed = [CommittedStep(step=step, attempt=1, metric=loss) for step, loss in losses.items()]
    assert kept_steps(committed, RetentionPolicy(keep=1, best=2)) == {20, 30, 60}


def test_of_equally_good_ones_the_newer_is_kept() -> None:
    committed = [CommittedStep(step=step, attempt=1, metric=1.0) for step in (10, 20, 30)]
    assert kept_steps(committed, RetentionPolicy(keep=1, best=2)) == {20, 30}


def test_damaged_checkpoint_does_not_take_the_place_of_a_whole_one() -> None:
    committed = [*plain(10, 20), CommittedStep(step=30, attempt=None)]
    assert plan_cleanup(committed, [], RetentionPolicy(keep=1)).delete_steps == (10,)


def test_loser_of_a_race_is_swept_and_the_winner_is_not() -> None:
    committed = [CommittedStep(step=10, attempt=2), CommittedStep(step=20, attempt=3)]
    plan = plan_cleanup(
        committed, [folder(10, 1), folder(10, 2), folder(20, 3)], RetentionPolicy(keep=2)
    )
    assert plan.delete_steps == ()
    assert plan.sweep == (folder(10, 1),)


def test_nothing_is_deleted_while_no_record_can_be_read() -> None:
    damaged = [CommittedStep(step=step, attempt=None) for step in (10, 20)]
    plan = plan_cleanup(damaged, [folder(10), folder(15)], RetentionPolicy(keep=1))
    assert plan.delete_steps == ()
    assert plan.sweep == ()


def test_remains_may_go_before_there_is_a_checkpoint() -> None:
    plan = plan_cleanup([], [folder(10), folder(20)], RetentionPolicy(keep=2), busy={(20, 1)})
    assert plan.delete_steps == ()
    assert plan.sweep == (folder(10),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"keep": 0}, "keep is 0"),
        ({"keep": 1, "spacing_steps": 0}, "spacing_steps is 0"),
        ({"keep": 1, "every_steps": 0}, "every_steps is 0"),
        ({"keep": 1, "best": -1}, "best is -1"),
    ],
)
def test_senseless_policy_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RetentionPolicy(**fields)


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


@pytest.mark.parametrize(
    ("written_at_s", "expected"), [(150.0, True), (100.0, False), (250.0, True), (None, True)]
)
def test_lease_holds_as_long_as_it_lasts(written_at_s: float | None, expected: bool) -> None:
    assert is_lease_held(written_at_s, now_s=200.0, lasts_s=60.0) is expected
