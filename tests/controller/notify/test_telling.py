"""What is told when: nothing is left out, nothing is told twice, and a storm is few messages."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.notices import Notice, NoticeKind
from controller.core.telling import Message, Wishes, due
from outlast.ids import JobId

K = NoticeKind
JOB = JobId("j")


def notice(kind: NoticeKind, at_s: float, number: int = 1, job: str = "j") -> Notice:
    incident = f"{job}-{number}" if kind in (K.INCIDENT, K.RECOVERY) else ""
    return Notice(
        key=f"{kind}/{incident or job}", kind=kind, job=JobId(job), at_s=at_s, incident=incident
    )


def told_over(
    notices: list[Notice], wishes: Wishes, until_s: float = 10_000.0
) -> list[tuple[float, Message]]:
    """Everything that is told, with a look each second."""
    told: dict[str, float] = {}
    said: list[tuple[float, Message]] = []
    for now in range(int(until_s)):
        happened = [each for each in notices if each.at_s <= now]
        for message in due(happened, told, wishes, now):
            told |= dict.fromkeys(message.keys, float(now))
            said.append((now, message))
    return said


def shape(said: list[tuple[float, Message]]) -> list[tuple[float, list[str]]]:
    return [(at_s, [str(each.kind) for each in message.notices]) for at_s, message in said]


def test_a_fault_that_is_over_at_once_is_one_message() -> None:
    fault = [notice(K.INCIDENT, 100), notice(K.RECOVERY, 112)]
    assert shape(told_over(fault, Wishes())) == [(112, ["incident", "recovery"])]


def test_a_fault_that_lasts_is_told_and_then_its_recovery() -> None:
    fault = [notice(K.INCIDENT, 100), notice(K.RECOVERY, 400)]
    assert shape(told_over(fault, Wishes())) == [(130, ["incident"]), (400, ["recovery"])]


def test_a_storm_is_one_message_in_ten_minutes() -> None:
    storm = []
    for number in range(100):
        at_s = 10 + 20 * number
        storm += [notice(K.INCIDENT, at_s, number), notice(K.RECOVERY, at_s + 10, number)]
    said = told_over(storm, Wishes())
    assert [at_s for at_s, _ in said] == [20, 620, 1220, 1820, 2420]
    assert sum(len(message.notices) for _, message in said) == 200


def test_what_ends_a_job_is_told_at_once_with_what_waited() -> None:
    said = told_over(
        [
            notice(K.INCIDENT, 10),
            notice(K.RECOVERY, 15),
            notice(K.INCIDENT, 30, 2),
            notice(K.FAILURE, 33),
        ],
        Wishes(),
    )
    assert shape(said) == [(15, ["incident", "recovery"]), (33, ["incident", "failure"])]
    assert said[-1][1].last.kind is K.FAILURE


def test_jobs_do_not_wait_for_each_other() -> None:
    both = [
        notice(K.INCIDENT, 10, job="a"),
        notice(K.RECOVERY, 11, job="a"),
        notice(K.INCIDENT, 12, job="b"),
        notice(K.RECOVERY, 13, job="b"),
    ]
    assert [(at_s, message.job) for at_s, message in told_over(both, Wishes())] == [
        (11, "a"),
        (13, "b"),
    ]


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        (Wishes(events=frozenset({K.FAILURE})), ["prod-1"]),
        (Wishes(jobs=("test-*",)), []),
        (Wishes(jobs=("test-*", "prod-?")), ["prod-1"]),
    ],
)
def test_only_what_is_wanted_is_told(wishes: Wishes, expected: list[str]) -> None:
    said = told_over([notice(K.FAILURE, 5, job="prod-1")], wishes, 20)
    assert [message.job for _, message in said] == expected


@given(
    st.lists(
        st.tuples(st.integers(0, 400), st.integers(1, 300), st.booleans()), min_size=1, max_size=12
    ),
    st.sampled_from([0.0, 7.0, 30.0]),
    st.sampled_from([0.0, 60.0, 600.0]),
)
def test_everything_is_told_once(
    faults: list[tuple[int, int, bool]], wait_s: float, repeat_s: float
) -> None:
    """Each fault and recovery exactly once, in order, and a fault never later than its recovery
    plus the time in which faults are gathered."""
    notices: list[Notice] = []
    at_s = 0.0
    for number, (gap_s, length_s, is_over) in enumerate(faults):
        at_s += gap_s
        notices.append(notice(K.INCIDENT, at_s, number))
        if is_over:
            notices.append(notice(K.RECOVERY, at_s + length_s, number))
        at_s += length_s
    wishes = Wishes(wait_s=wait_s, repeat_s=repeat_s)
    said = told_over(notices, wishes, at_s + wait_s + repeat_s + 2)
    counts = Counter(key for _, message in said for key in message.keys)
    assert counts == Counter(each.key for each in notices)
    when = {key: at for at, message in said for key in message.keys}
    for each in notices:
        assert each.at_s <= when[each.key] <= each.at_s + wait_s + repeat_s + 1
    # A message comes early only with the recovery from a fault that was told before.
    told: set[str] = set()
    for (before_s, before), (at_s, message) in pairwise(said):
        told.update(before.keys)
        recovered = {each.incident for each in message.notices if each.kind is K.RECOVERY}
        is_news = any(f"{K.INCIDENT}/{each}" in told for each in recovered)
        assert is_news or at_s - before_s >= repeat_s
