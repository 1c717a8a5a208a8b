"""How long a rank may stand still: recorded timings, replayed look by look."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from diagnostics.core.pace import (
    EARLY_FLOOR_S,
    STOPPED_S,
    UNNAMED_FACTOR,
    UNNAMED_FLOOR_S,
    USUAL_FLOOR_S,
    Look,
    Pace,
    Stall,
)
from outlast.blackbox import Phase

PERIOD_S = 0.2
# What the goal of the product allows: three steps and two seconds.
GOAL_STEPS = 3
GOAL_S = 2.0


@dataclass(frozen=True)
class Span:
    """A rank in one phase."""

    phase: Phase
    length_s: float
    ends_step: bool = False


def steps(number: int, step_s: float, *, eval_every: int = 0, eval_s: float = 0.0) -> list[Span]:
    """The phases of steps; forward and backward take nearly all of them."""
    spans: list[Span] = []
    for step in range(1, number + 1):
        spans += [
            Span(Phase.DATA, 0.02 * step_s),
            Span(Phase.FORWARD_BACKWARD, 0.9 * step_s),
            Span(Phase.OPTIMIZER, 0.08 * step_s, ends_step=True),
        ]
        if eval_every and step % eval_every == 0:
            spans.append(Span(Phase.EVALUATION, eval_s))
    return spans


def looks(spans: list[Span], *, period_s: float = PERIOD_S) -> Iterator[Look]:
    """What an observer sees of them, every so often."""
    totals: dict[Phase, float] = {}
    begun_s, next_s, done = 0.0, 0.0, 0
    for number, span in enumerate(spans):
        while next_s < begun_s + span.length_s:
            yield Look(
                at_s=next_s,
                place=(number,),
                phase=span.phase,
                num_steps=done,
                phases_s=dict(totals),
            )
            next_s += period_s
        begun_s += span.length_s
        totals[span.phase] = totals.get(span.phase, 0.0) + span.length_s
        done += span.ends_step


def replay(pace: Pace, seen: Iterator[Look]) -> list[Stall]:
    return [pace.look(look) for look in seen]


def last_look(seen: list[Look], **changes: object) -> Look:
    values = {name: getattr(seen[-1], name) for name in seen[-1].__slots__}
    return Look(**{**values, **changes})  # type: ignore[arg-type]  # checked by Look itself


def detected_after_s(pace: Pace, last: Look, within_s: float = 600.0) -> float | None:
    """How long after its last move a rank that stands from now on is over its limit."""
    for number in range(1, int(within_s / PERIOD_S)):
        at_s = last.at_s + number * PERIOD_S
        look = Look(
            at_s=at_s,
            place=last.place,
            phase=last.phase,
            num_steps=last.num_steps,
            phases_s=last.phases_s,
        )
        if pace.look(look).is_over:
            return number * PERIOD_S
    return None


def stopped_in_forward(pace: Pace, step_s: float, number: int) -> float | None:
    """How long after its last look a rank that stops in its forward pass is found."""
    seen = list(looks(steps(number, step_s)))
    while seen and seen[-1].phase is not Phase.FORWARD_BACKWARD:
        seen.pop()
    # Unless every look fell on another phase.
    assume(seen)
    replay(pace, iter(seen))
    return detected_after_s(pace, seen[-1])


@given(st.floats(0.01, 30.0), st.integers(20, 40))
def test_a_stop_is_found_within_three_steps_and_two_seconds(step_s: float, number: int) -> None:
    # So that the observer looks often enough to know the phase, however short the steps are.
    enough = number + int(16 * PERIOD_S / step_s)
    after_s = stopped_in_forward(Pace(), step_s, enough)
    assert after_s is not None
    assert after_s <= GOAL_STEPS * step_s + GOAL_S


@given(st.floats(0.01, 30.0), st.integers(6, 40))
def test_of_a_phase_seen_a_few_times_a_longer_pass_is_allowed(step_s: float, number: int) -> None:
    after_s = stopped_in_forward(Pace(), step_s, number)
    if after_s is not None:
        assert after_s <= 10 * (step_s + PERIOD_S) + EARLY_FLOOR_S + PERIOD_S


@given(
    st.floats(0.01, 5.0),
    st.floats(0.5, 120.0),
    st.floats(0.5, 1.5),
)
def test_slow_evaluations_raise_nothing(step_s: float, eval_s: float, last: float) -> None:
    """The first one, and one that takes half as long again as any before."""
    spans = steps(20, step_s, eval_every=5, eval_s=eval_s)
    spans += [*steps(5, step_s), Span(Phase.EVALUATION, last * eval_s), *steps(2, step_s)]
    stalls = replay(Pace(), looks(spans))
    assert not any(standing.is_over for standing in stalls)


def test_a_checkpoint_that_takes_five_times_as_long_for_once_raises_nothing() -> None:
    spans: list[Span] = []
    for length_s in (2.0, 2.2, 1.9, 10.0):
        spans += [*steps(30, 0.1), Span(Phase.CHECKPOINT, length_s)]
    assert not any(standing.is_over for standing in replay(Pace(), looks(spans)))


@given(st.floats(1.0, 3600.0), st.integers(5, 60))
def test_an_observer_that_was_away_blames_nobody(away_s: float, number: int) -> None:
    """The whole machine was stopped: ranks stood for as long as nobody could look."""
    pace = Pace()
    seen = list(looks(steps(number + 10, 0.1)))
    replay(pace, iter(seen))
    woken = last_look(seen, at_s=seen[-1].at_s + away_s)
    assert not pace.look(woken).is_over


def test_a_rank_that_gets_no_cpu_does_not_hang() -> None:
    pace = Pace()
    seen = list(looks(steps(40, 0.1)))
    replay(pace, iter(seen))
    for number in range(1, 200):
        starved = last_look(
            seen, at_s=seen[-1].at_s + number * PERIOD_S, starved_s=number * PERIOD_S
        )
        assert not pace.look(starved).is_over


def test_the_first_steps_have_no_learned_limit() -> None:
    """They compile, warm up and touch their memory for the first time."""
    slow_start = [Span(Phase.FORWARD_BACKWARD, 300.0, ends_step=True), *steps(2, 60.0)]
    stalls = replay(Pace(), looks(slow_start))
    assert {standing.limit_s for standing in stalls} == {None}
    assert "recovery.hang_timeout_s" in stalls[0].source


def started(attempts: list[list[Span]]) -> list[list[Stall]]:
    """How a rank stood in each of several attempts."""
    pace = Pace()
    found = []
    for spans in attempts:
        found.append(replay(pace, looks(spans)))
        pace.restarted()
    return found


@given(st.floats(0.05, 60.0))
def test_groups_that_form_no_more_are_found_by_earlier_starts(groups_s: float) -> None:
    start = [Span(Phase.STARTING, 0.01), Span(Phase.GROUPS, groups_s), Span(Phase.RESTORE, 1.0)]
    usual = [*start, *steps(2, 0.5)]
    hangs = [Span(Phase.STARTING, 0.01), Span(Phase.GROUPS, 12 * groups_s + 15.0)]
    first, second, third = started([usual, usual, hangs])
    # Nothing is known of the first one, and what is known of it is told of the next.
    assert {standing.limit_s for standing in first} == {None}
    assert not any(standing.is_over for standing in second)
    assert third[-1].is_over
    assert third[-1].limit_s == pytest.approx(10 * groups_s + EARLY_FLOOR_S)


@given(st.floats(1.0, 3600.0))
def test_a_restore_that_takes_longer_than_the_last_raises_nothing(restore_s: float) -> None:
    """Once from memory, then from storage."""
    attempts = [
        [Span(Phase.GROUPS, 0.3), Span(Phase.RESTORE, length_s), *steps(2, 60.0)]
        for length_s in (0.1, restore_s)
    ]
    assert not any(standing.is_over for standing in started(attempts)[1])


@pytest.mark.parametrize("phase", [Phase.GROUPS, Phase.RESTORE, Phase.FORWARD_BACKWARD])
def test_a_stopped_process_is_found_though_nothing_is_known_of_its_phase(phase: Phase) -> None:
    pace = Pace()
    begun = Look(at_s=0.0, place=(1,), phase=phase, num_steps=0, phases_s={})
    pace.look(begun)
    stalls = [
        pace.look(last_look([begun], at_s=number * PERIOD_S, is_stopped=True))
        for number in range(1, 20)
    ]
    assert stalls[-1].is_over
    assert "stopped by a signal" in stalls[-1].source
    assert next(each.stalled_s for each in stalls if each.is_over) < STOPPED_S + 2 * PERIOD_S


def unnamed(number: int, step_s: float) -> list[Span]:
    """Steps of a script that says nothing of what it does in them."""
    return [Span(Phase.STEP, step_s, ends_step=True) for _ in range(number)]


def after(pace: Pace, seen: list[Look], seconds: float, **changes: object) -> list[Stall]:
    """How the rank stands, look by look, if it is in the same place for so long.

    `moves_every_s` is how often it shows a sign of life.
    """
    every_s = float(str(changes.pop("moves_every_s", "inf")))
    begun_s = seen[-1].at_s
    found = []
    for number in range(1, int(seconds / PERIOD_S) + 1):
        stood_s = number * PERIOD_S
        look = last_look(seen, at_s=begun_s + stood_s, num_moves=int(stood_s / every_s), **changes)
        found.append(pace.look(look))
    return found


def test_an_evaluation_that_a_script_does_not_name_is_no_hang() -> None:
    pace = Pace()
    seen = list(looks(unnamed(40, 0.5)))
    assert not any(stall.is_over for stall in replay(pace, iter(seen)))
    assert not any(stall.is_over for stall in after(pace, seen, 1200.0, moves_every_s=10.0))


def test_a_script_that_shows_no_sign_of_life_in_a_step_hangs() -> None:
    pace = Pace()
    seen = list(looks(unnamed(40, 0.5)))
    replay(pace, iter(seen))
    stalls = after(pace, seen, 120.0)
    found_s = next(number for number, each in enumerate(stalls) if each.is_over) * PERIOD_S
    assert UNNAMED_FLOOR_S < found_s < UNNAMED_FLOOR_S + UNNAMED_FACTOR * 1.0 + 1.0
    assert stalls[-1].source.startswith("10 x the longest step ")


@pytest.mark.parametrize("step_s", [0.05, 0.5, 2.0])
def test_a_rank_that_is_stopped_in_a_step_is_found_as_soon_as_any(step_s: float) -> None:
    pace = Pace()
    seen = list(looks(unnamed(40, step_s)))
    replay(pace, iter(seen))
    # What it did just before is seen late, as a sign of life.
    stalls = after(pace, seen, 60.0, is_stopped=True, moves_every_s=1.5)
    found_s = next(number for number, each in enumerate(stalls) if each.is_over) * PERIOD_S
    assert found_s < GOAL_STEPS * step_s + GOAL_S


def test_what_was_learned_outlives_an_attempt_and_where_it_stood_does_not() -> None:
    pace = Pace()
    seen = list(looks(steps(40, 0.1)))
    replay(pace, iter(seen))
    assert detected_after_s(pace, seen[-1]) is not None
    pace.restarted()
    standing = pace.look(last_look(seen, at_s=seen[-1].at_s + 100.0))
    assert (standing.stalled_s, standing.is_over) == (0.0, False)
    assert standing.limit_s == pytest.approx(USUAL_FLOOR_S, abs=1.0)


def test_a_limit_says_where_it_comes_from() -> None:
    pace = Pace()
    standing = replay(pace, looks(steps(60, 1.0)))[-1]
    assert standing.limit_s is not None
    assert standing.source.startswith("3 x the longest ")
    assert standing.source.endswith(" s), and 1.25 s")


def test_a_rank_stands_for_too_long_only_when_its_limit_is_known() -> None:
    over = Stall(stalled_s=2.0, limit_s=1.0, source="")
    within = Stall(stalled_s=2.0, limit_s=30.0, source="")
    unknown = Stall(stalled_s=2.0, limit_s=None, source="")
    assert over.is_over
    assert not within.is_over
    assert not unknown.is_over


def silent(at_s: float, place: tuple[int, ...], **changes: object) -> Look:
    """A look at a script that has reported nothing and may be silent for 60 s."""
    begun = Look(
        at_s=at_s, place=place, phase=Phase.STARTING, num_steps=0, phases_s={}, silent_limit_s=60.0
    )
    return last_look([begun], **changes)


def silent_for(pace: Pace, length_s: float, *, place: tuple[int, ...] = (1,)) -> Stall:
    number = int(length_s / PERIOD_S)
    return [pace.look(silent(at * PERIOD_S, place)) for at in range(number + 1)][-1]


def test_a_script_without_steps_has_the_limit_of_its_job() -> None:
    within, over = silent_for(Pace(), 59.0), silent_for(Pace(), 61.0)
    assert (within.is_over, over.is_over) == (False, True)
    assert within.limit_s == 60.0
    assert within.source == "recovery.hang_timeout_s is 60 s"


def test_a_script_that_moves_is_not_silent() -> None:
    pace = Pace()
    assert silent_for(pace, 59.0).stalled_s > 58.0
    moved = pace.look(silent(59.2, (2,)))
    assert moved.stalled_s == 0.0


def test_a_stopped_script_is_found_at_once() -> None:
    pace = Pace()
    stalls = [pace.look(silent(at * PERIOD_S, (1,), is_stopped=True)) for at in range(20)]
    assert stalls[-1].is_over
    assert stalls[-1].limit_s == STOPPED_S
    assert "stopped by a signal" in stalls[-1].source


def test_a_script_that_reports_steps_is_held_against_what_was_learned() -> None:
    pace = Pace()
    silent_for(pace, 30.0)
    seen = list(looks(steps(60, 1.0)))
    stalls = replay(pace, iter(seen))
    assert not any(standing.is_over for standing in stalls)
    after_s = detected_after_s(pace, seen[-1])
    assert after_s is not None
    assert after_s <= GOAL_STEPS * 1.0 + GOAL_S
