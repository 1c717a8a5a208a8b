"""How far nodes' clocks are from the controller's. RFC 5905, sections 8 and 10."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.core.edge.clocks import DRIFT_S_PER_S, NUM_SAMPLES, ClockTable
from outlast.ids import NodeId
from outlast.v1 import agents_pb2

NODE = NodeId("n0")
US = 1_000
START_NS = 1_700_000_000 * 10**9


def trip(
    *, ahead_us: int, there_us: int, back_us: int, waited_us: int = 0
) -> agents_pb2.ClockRoundTrip:
    """A round trip, as a node whose clock is so far ahead tells of it."""
    received_ns = START_NS + there_us * US
    answered_ns = received_ns + waited_us * US
    return agents_pb2.ClockRoundTrip(
        sent_ns=START_NS + ahead_us * US,
        received_ns=received_ns,
        answered_ns=answered_ns,
        returned_ns=answered_ns + (back_us + ahead_us) * US,
    )


@given(
    ahead_us=st.integers(-(10**12), 10**12),
    ways=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), min_size=1, max_size=20),
    waited_us=st.integers(0, 10**7),
)
def test_the_true_offset_is_within_the_error(
    ahead_us: int, ways: list[tuple[int, int]], waited_us: int
) -> None:
    table = ClockTable()
    for there_us, back_us in ways:
        table.heard(
            NODE,
            trip(ahead_us=ahead_us, there_us=there_us, back_us=back_us, waited_us=waited_us),
            5.0,
        )
    found = table.reading(NODE, 5.0)
    assert found is not None
    # And of doubles, which have no more than a microsecond of such times.
    assert abs(found.ahead_s - ahead_us / 1e6) <= found.error_s + 1e-6 * abs(ahead_us / 1e6) + 1e-6
    # The smallest round trip among the last holds.
    last = ways[-NUM_SAMPLES:]
    assert found.error_s <= min(there + back for there, back in last) / 2e6 + 1e-9


def test_an_error_grows_with_age_until_a_newer_round_trip_is_better() -> None:
    table = ClockTable()
    assert table.reading(NODE, 0.0) is None
    table.heard(NODE, trip(ahead_us=3_000, there_us=100, back_us=100), 0.0)
    first = table.reading(NODE, 100.0)
    assert first is not None
    assert first.error_s == 100e-6 + 2 * DRIFT_S_PER_S * 100.0
    table.heard(NODE, trip(ahead_us=4_000, there_us=500, back_us=500), 100.0)
    second = table.reading(NODE, 100.0)
    assert second is not None
    assert (second.ahead_s, second.error_s) == (4e-3, 500e-6)


def test_what_cannot_have_been_a_round_trip_is_left_out() -> None:
    table = ClockTable()
    table.heard(NODE, agents_pb2.ClockRoundTrip(), 0.0)
    sane = trip(ahead_us=0, there_us=1, back_us=1)
    # It came back before it was sent, or was with the controller for longer than it was away.
    table.heard(NODE, agents_pb2.ClockRoundTrip(sent_ns=5, returned_ns=4), 0.0)
    sane.answered_ns = sane.received_ns - 1
    table.heard(NODE, sane, 0.0)
    sane.answered_ns = sane.returned_ns + 10**9
    table.heard(NODE, sane, 0.0)
    assert table.reading(NODE, 0.0) is None


def test_a_new_session_begins_anew() -> None:
    table = ClockTable()
    table.heard(NODE, trip(ahead_us=0, there_us=1, back_us=1), 0.0)
    table.began(NODE)
    assert table.reading(NODE, 0.0) is None
