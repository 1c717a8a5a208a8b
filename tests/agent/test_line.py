"""What is told to the controller, and since when there is none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.agent.core.buffer import EventBuffer, Weight
from controller.agent.core.line import Line


def line(limit_s: float = 60.0, max_events: int = 100) -> Line[str]:
    made: Line[str] = Line(EventBuffer(max_events), now_s=0.0)
    made.absence_limit_s = limit_s
    return made


def sent(of: Line[str]) -> list[str]:
    return [event.payload for event in of.take_unsent()]


def test_each_session_sends_once_what_is_not_acknowledged() -> None:
    made = line()
    made.add("first", Weight.LASTING)
    assert sent(made) == []
    made.welcomed()
    seq = made.add("second", Weight.LASTING)
    assert sent(made) == ["first", "second"]
    assert sent(made) == []
    made.acknowledged(seq - 1)
    made.lost(1.0)
    made.add("third", Weight.LASTING)
    assert sent(made) == []
    made.welcomed()
    assert sent(made) == ["second", "third"]


def test_only_the_newest_progress_of_an_attempt_is_kept_without_a_session() -> None:
    made = line()
    numbers = [made.add(f"step {step}", Weight.PROGRESS, ("job", 1)) for step in range(900)]
    made.add("exit", Weight.LASTING, ("job", 1))
    made.add("step 1 of another", Weight.PROGRESS, ("job", 2))
    assert set(numbers) == {1}
    made.welcomed()
    # Without gaps, for it has taken the place of the older ones.
    assert [event.seq for event in made.buffer.after(0)] == [1, 2, 3]
    assert sent(made) == ["step 899", "exit", "step 1 of another"]


def test_progress_that_was_sent_is_not_taken_back() -> None:
    made = line()
    made.welcomed()
    made.add("step 1", Weight.PROGRESS, ("job", 1))
    assert sent(made) == ["step 1"]
    made.lost(1.0)
    made.add("step 2", Weight.PROGRESS, ("job", 1))
    made.add("step 3", Weight.PROGRESS, ("job", 1))
    made.welcomed()
    assert sent(made) == ["step 1", "step 3"]


def test_progress_that_was_crowded_out_is_added_anew() -> None:
    made = line(max_events=2)
    made.add("step 1", Weight.PROGRESS, ("job", 1))
    made.add("first", Weight.LASTING)
    made.add("second", Weight.LASTING)
    made.add("step 2", Weight.PROGRESS, ("job", 1))
    made.welcomed()
    assert sent(made) == ["first", "second"]


def test_workers_are_given_up_once_for_each_absence() -> None:
    made: Line[str] = Line(EventBuffer(1), now_s=0.0)
    assert made.wake_at() == 1800.0
    assert not made.gives_up(1799.0)
    assert made.gives_up(1800.0)
    assert not made.gives_up(9999.0)
    made.lost(9999.0)
    assert not made.gives_up(99_999.0)
    made.welcomed()
    made.absence_limit_s = 5.0
    assert not made.gives_up(100_000.0)
    made.lost(100_000.0)
    # A try to connect that fails does not begin another absence.
    made.lost(100_004.0)
    assert made.wake_at() == 100_005.0
    assert made.gives_up(100_005.0)


acts = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(list(Weight)), st.integers(1, 2)),
        st.tuples(st.sampled_from(["welcome", "lose", "send", "ack"]), st.none(), st.just(0)),
    ),
    max_size=60,
)


@given(acts)
def test_whatever_happens_what_lasts_arrives_in_order_and_the_newest_progress(
    acts: list[tuple[str, Weight | None, int]],
) -> None:
    made = line()
    arrived: dict[int, str] = {}
    lasting: list[str] = []
    newest: dict[int, str] = {}

    def send() -> None:
        for event in made.take_unsent():
            # Sent again, a number means what it meant.
            assert arrived.setdefault(event.seq, event.payload) == event.payload

    for number, (act, weight, attempt) in enumerate(acts):
        match act:
            case "add":
                assert weight is not None
                made.add(f"{number}", weight, attempt)
                if weight is Weight.PROGRESS:
                    newest[attempt] = f"{number}"
                else:
                    lasting.append(f"{number}")
            case "welcome":
                made.lost(0.0)
                made.welcomed()
            case "lose":
                made.lost(0.0)
            case "send":
                send()
            case _:
                made.acknowledged(max(arrived, default=0))
    made.welcomed()
    send()
    told = [arrived[seq] for seq in sorted(arrived)]
    assert [each for each in told if each in lasting] == lasting
    assert set(newest.values()) <= set(told)
    assert sorted(arrived) == list(range(1, len(arrived) + 1))
