"""What jobs went through: kept beside the journal, and made up for from it after a crash."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.core.changes import JobPut
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.rpc.history import history_of, wrong_with_history
from controller.store import history
from controller.store.database import Database
from controller.store.history import CommitRow, History
from outlast.chosen import ChosenStart
from outlast.ids import Attempt
from outlast.v1 import jobs_pb2
from tests.controller.core.driver import Driver


@pytest.fixture
def job() -> JobRecord:
    return Driver().running().job()


def states_of(known: History, job: JobRecord) -> list[tuple[int, str]]:
    return [(row.attempt, row.state) for row in known.states(job.job_id, 100)]


def test_states_and_checkpoints_survive_a_restart(tmp_path: Path, job: JobRecord) -> None:
    database = Database(tmp_path / "j")
    known = History(database)
    stopped = replace(job, state=JobState.SUSPENDING, since_s=9.0, reason="rank 1 was killed")
    # The same again is no news.
    known.take([JobPut(job=job), JobPut(job=job), JobPut(job=stopped)])
    known.committed(CommitRow(job=job.job_id, step=7, attempt=1, at_s=8.0, size_bytes=10))
    known.flush()
    database.close()
    database = Database(tmp_path / "j")
    known = History(database)
    known.take([JobPut(job=stopped)])
    expected = [(1, JobState.RUNNING), (1, JobState.SUSPENDING)]
    assert states_of(known, job) == expected
    assert known.states(job.job_id, 100)[-1].reason == "rank 1 was killed"
    assert [row.size_bytes for row in known.commits(job.job_id, 100)] == [10]
    database.close()


def test_what_a_crash_lost_is_made_up_for(tmp_path: Path, job: JobRecord) -> None:
    database = Database(tmp_path / "j")
    known = History(database)
    known.committed(CommitRow(job=job.job_id, step=7, attempt=1, at_s=8.0, size_bytes=10))
    known.catch_up([replace(job, committed_step=7)])
    known.catch_up([replace(job, committed_step=9)])
    assert states_of(known, job) == [(1, JobState.RUNNING)]
    commits = [(row.step, row.size_bytes) for row in known.commits(job.job_id, 100)]
    assert commits == [(7, 10), (9, 0)]
    database.close()


def test_same_step_of_a_later_attempt_is_another_checkpoint(tmp_path: Path, job: JobRecord) -> None:
    database = Database(tmp_path / "j")
    known = History(database)
    # Two nodes tell of the first.
    for attempt, at_s in ((1, 8.0), (1, 9.0), (3, 20.0), (2, 30.0)):
        known.committed(CommitRow(job=job.job_id, step=7, attempt=attempt, at_s=at_s))
        known.flush()
    assert [(row.attempt, row.at_s) for row in known.commits(job.job_id, 9)] == [(3, 20.0)]
    chosen = replace(job, committed_step=None, chosen=(ChosenStart(step=0, attempt=Attempt(3)),))
    told = history_of(chosen, known, jobs_pb2.GetHistoryRequest()).checkpoints
    assert [(each.step, each.is_newest, each.is_given_up) for each in told] == [(7, False, True)]
    database.close()


def test_no_job_grows_without_bound(
    tmp_path: Path, job: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_STATES", 3)
    monkeypatch.setattr(history, "MAX_COMMITS", 2)
    database = Database(tmp_path / "j")
    known = History(database)
    for number in range(10):
        attempt = Attempt(number + 1)
        known.take([JobPut(job=replace(job, attempt=attempt))])
        known.committed(CommitRow(job=job.job_id, step=number, attempt=attempt))
        known.flush()
    assert [attempt for attempt, _ in states_of(known, job)] == [8, 9, 10]
    assert [row.step for row in known.commits(job.job_id, 100)] == [8, 9]
    database.close()


def page_of(known: History, job: JobRecord, **asked: Any) -> jobs_pb2.GetHistoryResponse:
    request = jobs_pb2.GetHistoryRequest(**asked)
    assert wrong_with_history(request) is None
    return history_of(job, known, request)


def attempts_and_steps(page: jobs_pb2.GetHistoryResponse) -> tuple[list[int], list[int]]:
    return [each.attempt for each in page.states], [each.step for each in page.checkpoints]


def test_pages_neither_skip_nor_repeat_while_new_ones_come_and_old_ones_go(
    tmp_path: Path, job: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_STATES", 6)
    monkeypatch.setattr(history, "MAX_COMMITS", 7)
    database = Database(tmp_path / "j")
    known = History(database)

    def more(number: int) -> None:
        known.take([JobPut(job=replace(job, attempt=Attempt(number), since_s=float(number)))])
        known.committed(CommitRow(job=job.job_id, step=10 * number, attempt=number))
        known.flush()

    for number in range(1, 7):
        more(number)
    first = page_of(known, job, most=2)
    assert attempts_and_steps(first) == ([5, 6], [50, 60])
    more(7)
    second = page_of(known, job, most=2, after=first.next)
    assert attempts_and_steps(second) == ([3, 4], [30, 40])
    # What is on the page before says when the last state of this one ended.
    assert [each.until_s for each in second.states] == [4.0, 5.0]
    # The first two are dropped, the controller is another, and there is an older checkpoint.
    more(8)
    known = History(database)
    known.committed(CommitRow(job=job.job_id, step=25, attempt=8))
    third = page_of(known, job, most=2, after=second.next)
    assert attempts_and_steps(third) == ([], [25])
    assert third.next == ""
    for number in range(9, 12):
        more(number)
    # All that is older than the first page is gone.
    assert attempts_and_steps(page_of(known, job, most=9, after=first.next)) == ([], [])
    assert page_of(known, job, most=7).next == ""
    database.close()


def test_a_list_that_is_shorter_ends_before_the_other_and_stays_there(
    tmp_path: Path, job: JobRecord
) -> None:
    database = Database(tmp_path / "j")
    known = History(database)
    for number in range(1, 5):
        known.take([JobPut(job=replace(job, attempt=Attempt(number)))])
    first = page_of(known, job, most=2)
    assert attempts_and_steps(first) == ([3, 4], [])
    # It is newer than what this page had.
    known.committed(CommitRow(job=job.job_id, step=0))
    assert attempts_and_steps(page_of(known, job, most=2, after=first.next)) == ([1, 2], [])
    for step in range(1, 4):
        known.committed(CommitRow(job=job.job_id, step=step))
    alone = page_of(known, job, most=3, only="checkpoints")
    assert attempts_and_steps(alone) == ([], [1, 2, 3])
    last = page_of(known, job, most=3, only="checkpoints", after=alone.next)
    assert (attempts_and_steps(last), last.next) == (([], [0]), "")
    states = page_of(known, job, most=3, only="states")
    last = page_of(known, job, most=3, only="states", after=states.next)
    assert (attempts_and_steps(last), last.next) == (([1], []), "")
    database.close()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"most": -1}, "most"),
        ({"most": 10_001}, "most"),
        ({"only": "incidents"}, "only"),
        *(({"after": after}, "after") for after in ("x", "-", "7", "1-2-3", "1 -2", f"{10**18}-1")),
        ({"after": "\u0661-2"}, "after"),
    ],
)
def test_what_is_no_page_is_named(asked: dict[str, Any], field: str) -> None:
    problem = wrong_with_history(jobs_pb2.GetHistoryRequest(**asked))
    assert problem is not None
    assert problem.field == field
    assert repr(asked[field]) in problem.message
    assert "allowed: " in problem.message


def test_job_that_is_deleted_leaves_nothing(tmp_path: Path, job: JobRecord) -> None:
    database = Database(tmp_path / "j")
    known = History(database)
    known.take([JobPut(job=job)])
    known.committed(CommitRow(job=job.job_id, step=7))
    known.flush()
    assert known.jobs() == [job.job_id]
    known.forget(job.job_id)
    database.close()
    with sqlite3.connect(tmp_path / "j") as connection:
        rows = [
            connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("job_states", "commits")
        ]
    connection.close()
    assert rows == [0, 0]
