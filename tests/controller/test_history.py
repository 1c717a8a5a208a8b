"""What jobs went through: kept beside the journal, and made up for from it after a crash."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from controller.core.changes import JobPut
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.rpc.history import history_of
from controller.store import history
from controller.store.database import Database
from controller.store.history import CommitRow, History
from outlast.chosen import ChosenStart
from outlast.ids import Attempt
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
    told = history_of(chosen, known, 0).checkpoints
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
