"""The journal in PostgreSQL: what the tests of the one in SQLite hold, and what two writers do."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import sqlalchemy as sa

from controller.core.changes import State
from controller.store import database as database_module
from controller.store.backend import DatabaseError, DatabaseTakenError, DiskFullError
from controller.store.curves import Curves
from controller.store.database import Database, DeposedError
from controller.store.diagnoses import Diagnoses
from controller.store.history import CommitRow, History
from controller.store.journal import Journal
from controller.store.postgres import parse_url
from controller.store.tables import CHANGES, CONTROLLER
from controller.store.trends import TrendStore
from diagnostics.core.baseline import Baseline
from diagnostics.core.history import Hour
from diagnostics.core.hours import ReadUntil
from diagnostics.core.node_days import NodeDay
from outlast.clock import SystemClock
from outlast.ids import JobId, NodeId
from outlast.v1 import diagnostics_pb2
from tests.controller.processes import wait_for
from tests.controller.test_journal import node_put, step_row
from tests.postgres.server import PASSWORD, Server, is_claimed, needs_postgres

pytestmark = needs_postgres
WAIT_S = 30.0


@contextmanager
def opened(url: str, *, snapshot_least_bytes: int = 2**20) -> Iterator[tuple[Database, Journal]]:
    database = Database(parse_url(url))
    try:
        yield database, Journal(database, SystemClock(), snapshot_least_bytes=snapshot_least_bytes)
    finally:
        database.close()


def test_fold_of_the_journal_is_the_state(url: str) -> None:
    """With snapshots in between, and as another connection sees it."""
    state, num_snapshots = State(), 0
    with opened(url, snapshot_least_bytes=1_000) as (_, journal):
        assert journal.take_over() == 1
        for number in range(60):
            change = node_put(f"n{number % 7}", f"change \x00 ü {number}")
            state.apply(change)
            journal.append([change])
            if journal.snapshot_is_due():
                journal.write_snapshot(state)
                num_snapshots += 1
        with opened(url) as (_, reader):
            assert reader.load() == state
        journal.append([])
        journal.probe()
    assert num_snapshots > 2
    with opened(url) as (_, journal):
        assert journal.take_over() == 2
        assert journal.load() == state


def test_curves_keep_the_last_attempt_of_each_step(url: str) -> None:
    with opened(url) as (database, journal):
        journal.take_over()
        curves = Curves(database)
        curves.take([step_row(1, 1, 5.0), step_row(2, 1, 4.0), step_row(2, 2, 0.1 + 0.2)])
        curves.take([step_row(3, 2, math.nan), step_row(3, 1, 9.0)])
        losses = [row.loss for row in curves.read(JobId("j"))]
        assert losses[:2] == [5.0, 0.1 + 0.2]
        assert math.isnan(losses[2])
        curves.take([replace(step_row(4, 2, math.inf), eval_loss=math.nan)])
        assert curves.read(JobId("j"))[-1].loss == math.inf
        (seen,) = curves.changed_since(JobId("j"), curves.version - 1)[0]
        assert seen.step == 4
        assert seen.eval_loss is not None
        assert math.isnan(seen.eval_loss)
    with opened(url) as (database, journal):
        journal.take_over()
        curves = Curves(database)
        assert curves.num_tokens(JobId("j")) == 500
        assert curves.jobs() == [JobId("j")]
        assert curves.forget(JobId("j"))
        assert curves.read(JobId("j")) == []


def test_what_is_kept_of_weeks_and_of_jobs_comes_back(url: str) -> None:
    job, node = JobId("j"), NodeId("n0")
    hour = Hour(
        begun_s=3600.0, attempt=1, layout="dp2", num_steps=7, tokens=70, seconds=3.5, step_s=0.5
    )
    with opened(url) as (database, journal):
        journal.take_over()
        trends = TrendStore(database)
        for number in (1, 2):
            trends.put_hours(job, [hour], ReadUntil(version=number, until_s=7200.0))
            trends.add_days({node: NodeDay(num_windows=2, ratios=0.25)}, 5)
        assert trends.hours(job, 0.0) == [hour]
        assert trends.read_until(job) == ReadUntil(version=2, until_s=7200.0)
        (found,) = trends.days(0).values()
        assert found == NodeDay(num_windows=4, ratios=0.5)
        assert type(found.num_windows) is int
        history = History(database)
        for attempt, size_bytes in ((1, 10), (2, 20), (1, 30)):
            history.committed(CommitRow(job=job, step=3, attempt=attempt, size_bytes=size_bytes))
        assert [row.size_bytes for row in history.commits(job, 10)] == [20]
        history.forget(job)
        assert history.commits(job, 10) == []


def test_runs_of_diagnostics_and_marks_come_back(url: str) -> None:
    with opened(url) as (database, journal):
        journal.take_over()
        diagnoses = Diagnoses(database)
        run = diagnostics_pb2.DiagnosticRun(run_id="r1", started_s=2.0, state="running")
        for _ in range(2):
            diagnoses.put(run)
        diagnoses.save_baseline(Baseline())
        diagnoses.recover()
        found = diagnoses.get("r1")
        assert found is not None
        assert found.state == "interrupted"
        assert diagnoses.load_baseline() == Baseline()
        journal.mark_poisoned("n0 7", "an event", "a zero byte: \0")
        assert journal.poisoned_sources() == ["n0 7"]


def test_write_that_has_begun_is_finished_before_another_takes_the_term(url: str) -> None:
    with opened(url) as (database, old), opened(url) as (_, new):
        old.take_over()
        with at_the_same_time(new.take_over) as (taker, errors):
            with database.write() as connection:
                taker.start()
                wait_until_it_waits(connection)
                row = {"term": 1, "at_s": 0.0, "fact": '{"is": "NodeForgotten", "node": "n9"}'}
                connection.execute(sa.insert(CHANGES), row)
            taker.join(WAIT_S)
            assert errors == []
        assert new.term == 2
        with pytest.raises(DeposedError, match="term 2 has begun"):
            old.append([node_put("never")])
        assert new.load() == State()


def test_write_that_comes_while_another_takes_the_term_never_lands(url: str) -> None:
    with opened(url) as (late, old), opened(url) as (database, reader):
        old.take_over()
        with at_the_same_time(lambda: old.append([node_put("never")])) as (writer, errors):
            with database.transaction() as connection:
                connection.execute(sa.update(CONTROLLER).values(term=2))
                writer.start()
                wait_until_it_waits(connection)
            writer.join(WAIT_S)
            (error,) = errors
            assert isinstance(error, DeposedError)
        assert reader.load() == State()
        curves = Curves(late)
        curves.take([step_row(1, 1, 5.0)])
        with pytest.raises(DeposedError):
            curves.flush()


@contextmanager
def at_the_same_time(
    work: Callable[[], object],
) -> Iterator[tuple[threading.Thread, list[Exception]]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run)
    yield thread, errors
    thread.join(WAIT_S)
    assert not thread.is_alive()


def wait_until_it_waits(connection: sa.Connection) -> None:
    """Until another session of this database waits for a lock."""
    query = sa.text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    for _ in range(10_000):
        # What it sees is kept for a transaction.
        connection.execute(sa.text("SELECT pg_stat_clear_snapshot()"))
        if connection.execute(query).scalar_one():
            return
    raise AssertionError("nobody waits")


def test_two_that_take_the_term_from_each_other_never_write_in_an_older_one(url: str) -> None:
    Database(parse_url(url)).close()
    num_written: list[int] = []

    def write() -> None:
        with opened(url) as (_, journal):
            written = 0
            for number in range(40):
                try:
                    if number % 4 == 0:
                        journal.take_over()
                    journal.append([node_put(f"n{number}")])
                    written += 1
                except DeposedError:
                    continue
            num_written.append(written)

    with at_the_same_time(write) as (first, errors), at_the_same_time(write) as (second, others):
        first.start()
        second.start()
    assert errors + others == []
    with opened(url) as (database, _), database.transaction() as connection:
        rows = connection.execute(sa.select(CHANGES.c.term).order_by(CHANGES.c.seq)).scalars()
        terms = list(rows)
    assert terms == sorted(terms)
    assert len(terms) == sum(num_written) > 0


def test_second_controller_is_kept_off_until_the_first_is_gone(url: str) -> None:
    with opened(url) as (first, _), opened(url) as (second, _):
        first.claim()
        with pytest.raises(DatabaseTakenError, match="another controller uses this database"):
            second.claim()
        first.close()
        wait_for(lambda: is_claimed(second), "the lock to be free")


def test_connection_that_was_cut_is_not_made_anew(url: str, server: Server) -> None:
    """With it went the lock that keeps other controllers off."""
    with opened(url) as (first, journal), opened(url) as (second, _):
        journal.take_over()
        first.claim()
        server.sql(
            "postgres",
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'",
        )
        with pytest.raises(DatabaseError, match="terminating connection"):
            journal.append([node_put("n0")])
        with pytest.raises(DatabaseError, match="the connection to it was lost"):
            journal.append([node_put("n0")])
        wait_for(lambda: is_claimed(second), "the lock to be free")


def test_full_disk_of_the_server_writes_nothing_and_is_got_over(url: str, server: Server) -> None:
    name = parse_url(url).database
    assert name is not None
    with opened(url) as (_, journal):
        journal.take_over()
        server.sql(
            name,
            "CREATE FUNCTION fill() RETURNS trigger AS $$ BEGIN RAISE EXCEPTION "
            "'no space left on device' USING ERRCODE = 'disk_full'; END $$ LANGUAGE plpgsql;"
            "CREATE TRIGGER fill BEFORE INSERT ON facts EXECUTE FUNCTION fill()",
        )
        with pytest.raises(DiskFullError, match="no space left"):
            journal.append([node_put("n0")])
        server.sql(name, "DROP TRIGGER fill ON facts")
        journal.append([node_put("n1")])
        assert set(journal.load().nodes) == {NodeId("n1")}


def test_database_of_a_newer_version_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(database_module, "SCHEMA_VERSION", 3)
        Database(parse_url(url)).close()
    with pytest.raises(DatabaseError, match=r"version 3 .*another database with --journal"):
        Database(parse_url(url))


def test_login_that_is_refused_is_said_without_the_password(
    url: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PGPASSFILE")
    monkeypatch.setenv("PGPASSWORD", "wrong-secret")
    with pytest.raises(DatabaseError, match=r"cannot be opened: .*authentication failed") as caught:
        Database(parse_url(url))
    assert "wrong-secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql+psycopg://outlast:{PASSWORD}@db/outlast",
        f"postgresql://outlast@db/outlast?password={PASSWORD}",
        f"mysql://outlast:{PASSWORD}@db/outlast",
        f"postgresql://outlast:{PASSWORD}@db",
        f"{PASSWORD}",
        f"postgresql://outlast:{PASSWORD}@db:port/outlast",
    ],
)
def test_url_that_is_not_allowed_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ValueError, match=r"--journal .*allowed: postgresql") as caught:
        parse_url(text)
    assert PASSWORD not in str(caught.value)
