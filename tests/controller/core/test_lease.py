"""When a controller that waits takes the leader for frozen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.core.lease import LEASE_S, RENEW_S, LeaseWatch, Renewal

LOOK_S = 0.25


def looks(watch: LeaseWatch, renewals: int, from_s: float, until_s: float) -> float | None:
    """When the lease is over, looked at all the while."""
    now_s = from_s
    while now_s < until_s:
        if watch.is_over(Renewal(holder=1, renewals=renewals, limit_s=LEASE_S), now_s):
            return now_s
        now_s += LOOK_S
    return None


def test_lease_that_is_not_renewed_is_over_after_its_length() -> None:
    watch = LeaseWatch()
    assert looks(watch, 7, 100.0, 110.0) is None
    # Renewed for the last time at 110.
    over_s = looks(watch, 8, 110.0, 200.0)
    assert over_s is not None
    assert 110.0 + LEASE_S < over_s <= 110.0 + LEASE_S + 2 * LOOK_S


def test_controller_that_was_frozen_itself_looks_anew() -> None:
    watch = LeaseWatch()
    assert looks(watch, 7, 0.0, 10.0) is None
    # Neither it nor the database answered for a minute; nor did perhaps the leader get through.
    assert looks(watch, 7, 70.0, 70.0 + LEASE_S) is None
    assert looks(watch, 7, 70.0 + LEASE_S, 100.0) is not None


def test_leader_that_reads_its_journal_has_the_time_that_it_asked_for() -> None:
    watch, seen = LeaseWatch(), Renewal(holder=1, renewals=1, limit_s=300.0)
    assert not any(watch.is_over(seen, float(now_s)) for now_s in range(300))
    assert watch.is_over(seen, 301.0)


@given(st.lists(st.floats(0.0, LEASE_S - RENEW_S), min_size=1, max_size=30))
def test_leader_that_renews_in_time_is_never_deposed(pauses_s: list[float]) -> None:
    watch, now_s = LeaseWatch(), 0.0
    for renewals, pause_s in enumerate(pauses_s):
        assert looks(watch, renewals, now_s, now_s + pause_s) is None
        now_s += pause_s
