"""Links at the scale of milliseconds: windows, rhythm, and one that falls behind its peers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnostics.core.host import Subject
from diagnostics.core.traffic import (
    BIN_S,
    LinkWatch,
    Rates,
    Sampled,
    Window,
    period_s,
)

MB = 1_000_000


def sampled(rates: Iterable[float], every_s: float) -> Sampled:
    """A link that has sent at these rates, each between two samples."""
    link, at_s, sent = Sampled(10.0, 500, 700), 10.0, 700.0
    for rate in rates:
        at_s += every_s
        sent += rate * every_s
        link.add([at_s], [500], [round(sent)])
    return link


def a_window(bytes_per_s: float, *, is_rdma: bool = False) -> Window:
    rates = Rates(least=0, mean=bytes_per_s / 2, most=bytes_per_s)
    return Window(
        is_rdma=is_rdma,
        seconds=2,
        num_samples=400,
        received=rates,
        sent=rates,
        longest_silence_s=0.1,
        period_s=None,
    )


def test_a_window_has_least_mean_and_most() -> None:
    link = sampled([0, 40 * MB, 20 * MB, 20 * MB], 0.005)
    window = link.cut()
    assert window is not None
    assert window.seconds == pytest.approx(0.02)
    assert window.num_samples == 4
    assert window.sent == Rates(
        least=0, mean=pytest.approx(20 * MB), most=pytest.approx(40 * MB, rel=1e-6)
    )
    assert window.received == Rates(least=0, mean=0, most=0)
    assert window.bytes_per_s == pytest.approx(20 * MB)
    # What comes is of the next one.
    assert link.cut() is None


def test_the_longest_silence_goes_on_over_windows() -> None:
    link = sampled([50 * MB, 0, 0, 50 * MB, 0, 0, 0], 0.1)
    first = link.cut()
    link.add([11.5], [500], [10_000_700])
    second = link.cut()
    assert first is not None
    assert second is not None
    assert first.longest_silence_s == pytest.approx(0.3, abs=0.06)
    # From the fourth sample at 10.4 s.
    assert second.longest_silence_s == pytest.approx(1.1, abs=0.06)


@pytest.mark.parametrize("every_s", [0.001, 0.01, 0.03])
def test_little_that_goes_on_beside_training_is_silence(every_s: float) -> None:
    """A heartbeat of 20 kB each second, however often the counters are read."""
    link, sent = Sampled(0.0, 0, 0), 0
    for number in range(1, round(4 / every_s)):
        at_s = number * every_s
        sent = 20_000 * int(at_s)
        link.add([at_s], [0], [sent])
    window = link.cut()
    assert window is not None
    assert sent == 60_000
    assert window.longest_silence_s == pytest.approx(4.0, abs=0.12)


def test_a_counter_that_begins_anew_is_not_less_than_nothing() -> None:
    link = Sampled(0.0, 10 * MB, 0)
    link.add([1.0], [12 * MB], [0])
    link.add([2.0], [5], [0])
    link.add([3.0], [3 * MB + 5], [0])
    window = link.cut()
    assert window is not None
    assert window.received == Rates(least=0, mean=pytest.approx(5 * MB / 3), most=3 * MB)


@given(st.lists(st.tuples(st.floats(0.0005, 0.2), st.integers(0, 10**9)), min_size=1, max_size=200))
def test_nothing_that_was_counted_is_lost_or_doubled(steps: list[tuple[float, int]]) -> None:
    link, at_s, received = Sampled(0.0, 0, 0), 0.0, 0
    carried = 0.0
    for number, (seconds, count) in enumerate(steps):
        at_s += seconds
        received += count
        link.add([at_s], [received], [0])
        if number % 7 == 6:
            window = link.cut()
            assert window is not None
            assert window.received.least <= window.received.mean * (1 + 1e-9)
            assert window.received.mean <= window.received.most * (1 + 1e-9)
            carried += window.received.mean * window.seconds
    last = link.cut()
    carried += 0 if last is None else last.received.mean * last.seconds
    assert carried == pytest.approx(received, rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("period", [0.12, 0.5, 2.3, 7.0])
def test_a_rhythm_is_found(period: float) -> None:
    """Bursts of a third of the period, and small ones in between, as of pipeline stages."""
    times = [number * BIN_S for number in range(3000)]
    series = [
        100.0 if at_s % period < period / 3 else (10.0 if at_s % 0.07 < 0.02 else 0.0)
        for at_s in times
    ]
    found = period_s(series, BIN_S)
    assert found == pytest.approx(period, abs=2 * BIN_S)


def test_what_never_comes_again_has_no_rhythm() -> None:
    assert period_s([], BIN_S) is None
    # Two bursts, or three at odd times, are no rhythm.
    for bursts in ([5.0, 12.0], [3.0, 9.0, 21.0]):
        series = [
            float(any(at_s <= number * BIN_S < at_s + 0.4 for at_s in bursts))
            for number in range(3000)
        ]
        assert period_s(series, BIN_S) is None
    assert period_s([7.0] * 3000, BIN_S) is None
    assert period_s([float(number) for number in range(3000)], BIN_S) is None
    # Numbers without an order: squares modulo a prime.
    assert period_s([float(number * number % 2999) for number in range(1400)], BIN_S) is None


def watched(rounds: Iterable[dict[str, float]]) -> list[tuple[int, str, bool]]:
    """The round, the link and whether it is over, of all that is found."""
    watch = LinkWatch()
    found = []
    for number, rates in enumerate(rounds):
        windows = {
            link: a_window(rate, is_rdma=link.startswith("mlx5")) for link, rate in rates.items()
        }
        for change in watch.take(windows):
            assert change.subject is Subject.TRAFFIC
            assert not change.spares_node
            found.append((number, change.what, not change.message))
    return found


def all_of(rate: float, **others: float) -> dict[str, float]:
    return {f"rail{number}": rate for number in range(4)} | others


USUAL = all_of(400 * MB)
LEARNED = [USUAL] * 11


def test_a_link_that_stops_is_found_soon_and_is_over_later() -> None:
    stopped = all_of(400 * MB, rail2=1 * MB)
    assert watched([*LEARNED, *[stopped] * 8, *[USUAL] * 8]) == [
        (12, "rail2", False),
        (23, "each link", True),
    ]
    # In one window the burst of the others may fall that is its own in the next.
    assert watched([*LEARNED, stopped, *[USUAL] * 8]) == []


def test_a_link_that_is_slower_than_before_is_found_when_that_lasts() -> None:
    slow = all_of(400 * MB, rail2=150 * MB)
    assert watched([*LEARNED, *[slow] * 6]) == [(13, "rail2", False)]
    # Once is chance.
    assert watched([*LEARNED, slow, *[USUAL] * 6]) == []


def test_what_is_over_is_so_with_the_last_link() -> None:
    """One incident stands for all links of a node."""
    two = all_of(400 * MB, rail1=0.0, rail2=0.0)
    one = all_of(400 * MB, rail2=0.0)
    assert watched([*LEARNED, *[two] * 4, *[one] * 8, *[USUAL] * 8]) == [
        (12, "rail1", False),
        (12, "rail2", False),
        (27, "each link", True),
    ]


def test_links_that_rest_together_are_well() -> None:
    rest = all_of(0.0)
    # As in a checkpoint, and after one.
    assert watched([*LEARNED, *[rest] * 6, *[USUAL] * 6]) == []
    # All are slower: that is not a link's fault.
    assert watched([*LEARNED, *[all_of(100 * MB)] * 10]) == []


def test_a_link_that_goes_on_is_well_whatever_others_do_more() -> None:
    assert watched([*LEARNED, *[all_of(4000 * MB, rail3=400 * MB)] * 6]) == []


def test_bursts_that_fill_a_window_now_and_then_are_the_rhythm_of_a_long_step() -> None:
    """A step of 6 s, whose gradients take 2: each window has them, or none."""
    busy, idle = all_of(900 * MB), all_of(0.0)
    steps = [busy, idle, idle] * 6
    assert watched(steps) == []
    broken = all_of(900 * MB, rail1=0.0)
    assert watched([*steps, *[broken, idle, idle] * 4]) == [(21, "rail1", False)]


def test_stages_that_do_not_keep_time_are_no_peers() -> None:
    """Two pipeline stages of one node, whose gradients come one after the other."""
    first = {f"a{number}": 300 * MB for number in range(3)}
    second = {f"b{number}": 300 * MB for number in range(3)}
    one = first | dict.fromkeys(second, 0.0)
    other = dict.fromkeys(first, 0.0) | second
    assert watched([one, other] * 12) == []


def test_links_that_carry_something_else_are_no_peers() -> None:
    """The one for storage has its own times; two alone cannot say which one is at fault."""
    usual = {"rail0": 400 * MB, "rail1": 390 * MB, "storage": 30 * MB}
    bad = {**usual, "rail1": 0.0, "storage": 0.0}
    assert watched([*[usual] * 11, *[bad] * 6]) == []
    # An upload as long as all that is known: RDMA ports are not held against network devices.
    rails = {f"mlx5_{number}/1": 400 * MB for number in range(3)}
    upload = rails | {"eth0": 300 * MB}
    assert watched([*[upload] * 17, *[rails | {"eth0": 0.5 * MB}] * 20]) == []


def test_a_link_that_is_gone_while_others_go_on_is_told() -> None:
    gone = {link: rate for link, rate in USUAL.items() if link != "rail2"}
    assert watched([*LEARNED, *[gone] * 4, *[USUAL] * 5]) == [
        (12, "rail2", False),
        (19, "each link", True),
    ]
    # All of them: nobody reads their counters any more.
    assert watched([*LEARNED, {}, {}, {}]) == []
