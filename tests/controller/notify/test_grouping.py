"""Which events make a message: each is sent once, and many faults are few messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.notifications.grouping import Message, Route, due
from controller.core.notifications.job_events import EventKind, JobEvent
from outlast.ids import JobId

K = EventKind
JOB = JobId("j")


def event(kind: EventKind, at_s: float, number: int = 1, job: str = "j") -> JobEvent:
    incident = f"{job}-{number}" if kind in (K.INCIDENT, K.RECOVERY, K.NOTE) else ""
    return JobEvent(
        key=f"{kind}/{incident or job}",
        kind=kind,
        job=JobId(job),
        at_s=at_s,
        incident=incident,
        stops_job=kind is not K.NOTE,
    )


def sent_over(
    events: list[JobEvent], route: Route, until_s: float = 10_000.0
) -> list[tuple[float, Message]]:
    """All messages, with a poll each second."""
    sent: dict[str, float] = {}
    said: list[tuple[float, Message]] = []
    for now in range(int(until_s)):
        happened = [each for each in events if each.at_s <= now]
        for message in due(happened, sent, route, now):
            sent |= dict.fromkeys(message.keys, float(now))
            said.append((now, message))
    return said


def shape(said: list[tuple[float, Message]]) -> list[tuple[float, list[str]]]:
    return [(at_s, [str(each.kind) for each in message.events]) for at_s, message in said]


def test_a_fault_that_is_over_at_once_is_one_message() -> None:
    fault = [event(K.INCIDENT, 100), event(K.RECOVERY, 112)]
    assert shape(sent_over(fault, Route())) == [(112, ["incident", "recovery"])]


def test_a_fault_that_lasts_is_sent_and_then_its_recovery() -> None:
    fault = [event(K.INCIDENT, 100), event(K.RECOVERY, 400)]
    assert shape(sent_over(fault, Route())) == [(130, ["incident"]), (400, ["recovery"])]


def test_a_storm_is_one_message_in_ten_minutes() -> None:
    storm = []
    for number in range(100):
        at_s = 10 + 20 * number
        storm += [event(K.INCIDENT, at_s, number), event(K.RECOVERY, at_s + 10, number)]
    said = sent_over(storm, Route())
    assert [at_s for at_s, _ in said] == [20, 620, 1220, 1820, 2420]
    assert sum(len(message.events) for _, message in said) == 200


def test_the_end_of_a_job_is_sent_at_once_with_what_waited() -> None:
    said = sent_over(
        [
            event(K.INCIDENT, 10),
            event(K.RECOVERY, 15),
            event(K.INCIDENT, 30, 2),
            event(K.FAILURE, 33),
        ],
        Route(),
    )
    assert shape(said) == [(15, ["incident", "recovery"]), (33, ["incident", "failure"])]
    assert said[-1][1].newest.kind is K.FAILURE


def test_a_fault_that_lasts_does_not_wait_for_those_that_are_collected() -> None:
    sent = sent_over(
        [
            event(K.INCIDENT, 10),
            event(K.RECOVERY, 15),
            event(K.INCIDENT, 50, 2),
            event(K.RECOVERY, 55, 2),
            event(K.INCIDENT, 100, 3),
            event(K.RECOVERY, 400, 3),
        ],
        Route(),
    )
    assert shape(sent) == [
        (15, ["incident", "recovery"]),
        (130, ["incident", "recovery", "incident"]),
        (400, ["recovery"]),
    ]


def test_jobs_do_not_wait_for_each_other() -> None:
    both = [
        event(K.INCIDENT, 10, job="a"),
        event(K.RECOVERY, 11, job="a"),
        event(K.INCIDENT, 12, job="b"),
        event(K.RECOVERY, 13, job="b"),
    ]
    assert [(at_s, message.job) for at_s, message in sent_over(both, Route())] == [
        (11, "a"),
        (13, "b"),
    ]


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (Route(kinds=frozenset({K.FAILURE})), ["prod-1"]),
        (Route(jobs=("test-*",)), []),
        (Route(jobs=("test-*", "prod-?")), ["prod-1"]),
    ],
)
def test_only_matching_events_are_sent(route: Route, expected: list[str]) -> None:
    said = sent_over([event(K.FAILURE, 5, job="prod-1")], route, 20)
    assert [message.job for _, message in said] == expected


def test_faults_are_collected_too_for_who_wants_no_recoveries() -> None:
    storm = []
    for number in range(50):
        at_s = 10 + 20 * number
        storm += [event(K.INCIDENT, at_s, number), event(K.RECOVERY, at_s + 10, number)]
    sent = sent_over(storm, Route(kinds=frozenset({K.INCIDENT})))
    assert [at_s for at_s, _ in sent] == [20, 620, 1220]
    assert {each.kind for _, message in sent for each in message.events} == {K.INCIDENT}


WITH_NOTES = Route(kinds=frozenset(K))


def test_notes_are_sent_only_where_they_are_asked_for_and_collected() -> None:
    notes = [event(K.NOTE, 10 + 20 * number, number) for number in range(100)]
    assert sent_over(notes, Route()) == []
    said = sent_over(notes, WITH_NOTES)
    assert [at_s for at_s, _ in said] == [40, 640, 1240, 1840, 2440]
    assert sum(len(message.events) for _, message in said) == 100


def test_a_note_delays_no_fault_and_goes_with_its_message() -> None:
    said = sent_over(
        [
            event(K.NOTE, 10),
            event(K.INCIDENT, 60, 2),
            event(K.RECOVERY, 65, 2),
            event(K.NOTE, 70, 3),
            event(K.INCIDENT, 100, 4),
            event(K.RECOVERY, 400, 4),
        ],
        WITH_NOTES,
    )
    assert shape(said) == [
        (40, ["note"]),
        (65, ["incident", "recovery"]),
        (130, ["note", "incident"]),
        (400, ["recovery"]),
    ]


def test_storage_trouble_again_and_again_is_one_message_in_ten_minutes() -> None:
    """Training goes on meanwhile, and no recovery ends it."""
    troubles = [
        replace(event(K.INCIDENT, 10 + 60 * number, number), stops_job=False)
        for number in range(20)
    ]
    said = sent_over(troubles, Route())
    assert [at_s for at_s, _ in said] == [40, 640, 1240]


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 300), st.booleans()), min_size=1, max_size=12
    ),
    st.sampled_from([0.0, 7.0, 30.0]),
    st.sampled_from([0.0, 60.0, 600.0]),
)
def test_every_event_is_sent_once(
    faults: list[tuple[int, int, bool]], wait_s: float, repeat_s: float
) -> None:
    """Each fault and recovery exactly once, in order, and a fault never later than its recovery
    plus the time in which faults are gathered."""
    events: list[JobEvent] = []
    at_s = 0.0
    for number, (gap_s, length_s, is_over) in enumerate(faults):
        at_s += gap_s
        events.append(event(K.INCIDENT, at_s, number))
        if is_over:
            events.append(event(K.RECOVERY, at_s + length_s, number))
        at_s += length_s
    route = Route(wait_s=wait_s, repeat_s=repeat_s)
    said = sent_over(events, route, at_s + wait_s + repeat_s + 2)
    counts = Counter(key for _, message in said for key in message.keys)
    assert counts == Counter(each.key for each in events)
    when = {key: at for at, message in said for key in message.keys}
    for each in events:
        assert each.at_s <= when[each.key] <= each.at_s + wait_s + repeat_s + 1
    # A message comes early only with a fault that lasts, or the recovery from one that was sent.
    over_s = {each.incident: each.at_s for each in events if each.kind is K.RECOVERY}
    sent: set[str] = set()
    for (before_s, before), (at_s, message) in pairwise(said):
        sent.update(before.keys)
        is_news = any(
            f"{K.INCIDENT}/{each.incident}" in sent
            if each.kind is K.RECOVERY
            else over_s.get(each.incident, at_s + 1) > at_s >= each.at_s + wait_s
            for each in message.events
        )
        assert is_news or at_s - before_s >= repeat_s
