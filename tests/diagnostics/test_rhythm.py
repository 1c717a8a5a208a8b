"""A link that leaves the rhythm of the training at equal volume, by windows and by samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from diagnostics.core.host import Change, Subject
from diagnostics.core.rhythm import is_same
from diagnostics.core.traffic import RHYTHM_S, WINDOW_S, LinkWatch, Rates, Sampled, Window

MB = 1_000_000
RAILS = tuple(f"rail{number}" for number in range(4))
USUAL_S, OTHER_S = 0.5, 0.8
# Until all of what a rhythm is found by came after the change.
OUT = round(RHYTHM_S / WINDOW_S)
IN = 5

Of = tuple[float | None, float]


def a_window(period_s: float | None, bytes_per_s: float) -> Window:
    rates = Rates(least=0, mean=bytes_per_s / 2, most=bytes_per_s)
    return Window(
        is_rdma=False,
        seconds=2,
        num_samples=400,
        received=rates,
        sent=rates,
        longest_silence_s=0.1,
        period_s=period_s,
    )


def watched(rounds: Iterable[Mapping[str, Of]]) -> list[tuple[int, Change]]:
    """The round and the change, of all that is found."""
    watch = LinkWatch()
    return [
        (number, change)
        for number, links in enumerate(rounds)
        for change in watch.take({link: a_window(*of) for link, of in links.items()})
    ]


def told(rounds: Iterable[Mapping[str, Of]]) -> list[tuple[int, str, bool]]:
    """The round, the link and whether it is over."""
    return [(number, change.what, not change.message) for number, change in watched(rounds)]


def all_of(period_s: float | None, rate: float = 400 * MB, **others: Of) -> dict[str, Of]:
    return dict.fromkeys(RAILS, (period_s, rate)) | others


LEARNED = [all_of(USUAL_S)] * 14


@pytest.mark.parametrize("period_s", [OTHER_S, 0.3, None])
def test_a_link_that_leaves_the_rhythm_of_its_peers_is_found(period_s: float | None) -> None:
    out = all_of(USUAL_S, rail2=(period_s, 400 * MB))
    found = watched([*LEARNED, *[out] * (OUT + 9), *[all_of(USUAL_S)] * (IN + 3)])
    assert [(number, each.what) for number, each in found] == [
        (14 + OUT - 1, "rail2"),
        (14 + OUT + 9 + IN - 1, "each link"),
    ]
    change = found[0][1]
    assert change.subject is Subject.TRAFFIC
    now = "with no period that is found" if period_s is None else f"after {period_s:.2f} s"
    assert change.message == (
        f"rail2 has left its rhythm: it carries as much as it did, but that comes again {now}; it "
        f"was after 0.50 s, as it still is on 3 links that kept time with it"
    )


def test_shorter_than_the_time_in_which_rhythms_are_found_is_chance() -> None:
    out = all_of(USUAL_S, rail2=(OTHER_S, 400 * MB))
    assert told([*LEARNED, *[out] * (OUT - 1), *[all_of(USUAL_S)] * 20]) == []


def test_a_rhythm_that_all_links_take_on_is_that_of_the_training() -> None:
    """As with longer sequences; what leaves the new one later is found as well."""
    new = [*LEARNED, *[all_of(OTHER_S)] * 60]
    assert told(new) == []
    out = all_of(OTHER_S, rail1=(0.37, 400 * MB))
    assert told([*new, *[out] * OUT]) == [(14 + 60 + OUT - 1, "rail1", False)]
    # All have none, as while a checkpoint is written.
    assert told([*LEARNED, *[all_of(None)] * 30, *LEARNED]) == []


def test_half_of_the_links_cannot_say_which_half_it_is() -> None:
    out = all_of(USUAL_S, rail2=(OTHER_S, 400 * MB), rail3=(OTHER_S, 400 * MB))
    # Each of the two has two peers of three that go on: both have left.
    assert [what for _, what, _ in told([*LEARNED, *[out] * OUT])] == ["rail2", "rail3"]
    out |= {"rail1": (OTHER_S, 400 * MB)}
    assert told([*LEARNED, *[out] * (OUT + 5)]) == []


def test_two_links_alone_say_nothing() -> None:
    two = dict.fromkeys(RAILS[:2], (USUAL_S, 400.0 * MB))
    out: dict[str, Of] = {**two, "rail1": (OTHER_S, 400.0 * MB)}
    assert told([*[two] * 14, *[out] * (OUT + 5)]) == []


def test_a_link_that_carries_another_volume_carries_something_else() -> None:
    """An upload beside the gradients."""
    more = all_of(USUAL_S, rail2=(OTHER_S, 600 * MB))
    assert told([*LEARNED, *[more] * (OUT + 5)]) == []


def test_a_link_without_a_steady_rhythm_has_none_to_leave() -> None:
    rounds = [all_of(USUAL_S, rail2=(0.2 + 0.17 * (number % 5), 400 * MB)) for number in range(60)]
    assert told(rounds) == []


def test_multiples_of_a_period_are_the_same_rhythm() -> None:
    assert all(is_same(each, 0.5) for each in (0.5, 0.56, 0.45, 1.0, 0.25, 1.5, 0.17))
    assert not any(is_same(each, 0.5) for each in (None, 0.0, 0.6, 0.36, 0.8, 1.1, 2.5))
    doubled = all_of(USUAL_S, rail2=(2 * USUAL_S, 400 * MB))
    assert told([*LEARNED, *[doubled] * (OUT + 5)]) == []


def test_a_link_that_is_out_of_rhythm_and_then_stops_is_over_once() -> None:
    out = all_of(USUAL_S, rail2=(OTHER_S, 400 * MB))
    stopped = all_of(USUAL_S, rail2=(None, 1 * MB))
    rounds = [*LEARNED, *[out] * OUT, *[stopped] * 4, *[all_of(USUAL_S)] * 40]
    assert told(rounds) == [
        (14 + OUT - 1, "rail2", False),
        (14 + OUT + 1, "rail2", False),
        (14 + OUT + 4 + IN - 1, "each link", True),
    ]


def bursts(links: Mapping[str, float], seconds: float, watch: LinkWatch) -> list[str]:
    """What is found of samples: each link sends a fifth of the time, after its period again."""
    every_s, found = 0.02, []
    sampled = {link: Sampled(0.0, 0, 0) for link in links}
    sent = dict.fromkeys(links, 0.0)
    for number in range(1, round(seconds / every_s) + 1):
        at_s = number * every_s
        for link, period in links.items():
            usual = period if link != "rail2" or at_s > LEARN_S else links["rail0"]
            if at_s % usual < usual / 5:
                sent[link] += 500 * MB * every_s
            sampled[link].add([at_s], [0], [round(sent[link])])
        if number % round(WINDOW_S / every_s) == 0:
            cut = {link: each.cut() for link, each in sampled.items()}
            windows = {link: window for link, window in cut.items() if window is not None}
            found += [change.what for change in watch.take(windows)]
    return found


LEARN_S = 50.0


def test_bursts_of_another_period_are_found_by_their_samples() -> None:
    rails = dict.fromkeys(RAILS, USUAL_S)
    assert bursts(rails, LEARN_S + 80.0, LinkWatch()) == []
    assert bursts(rails | {"rail2": OTHER_S}, LEARN_S + 80.0, LinkWatch()) == ["rail2"]
