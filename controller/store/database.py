"""The controller's one SQLite file: its tables, and transactions on it.

Everything here runs in the controller's loop, on one connection and one thread:
between what the machine decides and what is durable, nobody can look. WAL with
`synchronous=FULL` makes a commit one fsync; `BEGIN IMMEDIATE` takes the write
lock before the term is checked, so that check and append are one act.

What is stored in the tables is the business of `journal` and `curves`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError

from controller.store.reserve import has_room
from outlast.errors import FatalError

# Of the tables and of what is in their rows. A controller reads every older one, and none that is
# newer: it would lose what it does not know. 2: rows of changed fields, of many orders, of many
# answers (`controller.core.written`).
SCHEMA_VERSION = 2
# Another process holds the write lock for one commit at most.
BUSY_TIMEOUT_MS = 5_000

METADATA = sa.MetaData()

# One row: who may write.
CONTROLLER = sa.Table(
    "controller",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("schema_version", sa.Integer, nullable=False),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("probed_s", sa.Double, nullable=False),
)

CHANGES = sa.Table(
    "facts",
    METADATA,
    sa.Column(
        "seq",
        sa.BigInteger().with_variant(sa.Integer, "sqlite"),
        primary_key=True,
        autoincrement=True,
    ),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("fact", sa.Text, nullable=False),
    # Numbers of truncated changes are never given out again.
    sqlite_autoincrement=True,
)

SNAPSHOTS = sa.Table(
    "snapshots",
    METADATA,
    # The snapshot holds every change up to and including this one.
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("facts", sa.Text, nullable=False),
)

STEPS = sa.Table(
    "steps",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    # Rises with every row written, so that a watcher can ask for what is new.
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("attempt", sa.BigInteger, nullable=False),
    # SQLite has no NaN: it becomes NULL here, and NaN again when it is read.
    sa.Column("loss", sa.Double),
    sa.Column("grad_norm", sa.Double),
    sa.Column("learning_rate", sa.Double),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("duration_s", sa.Double, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("evaluated", sa.Boolean, nullable=False),
    sa.Column("eval_loss", sa.Double),
    # A `StepSplit`, in protobuf's own form; NULL where it is not known.
    sa.Column("split", sa.LargeBinary),
    sa.Index("steps_by_version", "job_id", "version"),
)

# Tokens that jobs trained on, redone steps included; `steps` keeps each step once.
TOKENS = sa.Table(
    "tokens",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("tokens", sa.BigInteger, nullable=False),
)


# The states that jobs went through, each from `at_s` on.
JOB_STATES = sa.Table(
    "job_states",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    # Rises by one from each state of a job to its next.
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
)

# Checkpoints that were committed, whether or not they are still in storage.
COMMITS = sa.Table(
    "commits",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    # 0, too, where it is not known; so it is with the other two.
    sa.Column("attempt", sa.BigInteger, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
)

# Events on which a turn failed, for the next controller to skip and for people to read.
POISONED = sa.Table(
    "poisoned",
    METADATA,
    sa.Column("seq", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("term", sa.BigInteger, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    # Who sent it, and its number; "" for what no agent sent.
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("event", sa.Text, nullable=False),
    sa.Column("error", sa.Text, nullable=False),
)

# Runs of diagnostics, without their findings.
DIAGNOSES = sa.Table(
    "diagnoses",
    METADATA,
    sa.Column("run_id", sa.Text, primary_key=True),
    sa.Column("started_s", sa.Double, nullable=False),
    sa.Column("document", sa.Text, nullable=False),
)

# Their findings, of which there may be tens of thousands: a list of runs must not read them.
DIAGNOSIS_FINDINGS = sa.Table(
    "diagnosis_findings",
    METADATA,
    sa.Column("run_id", sa.Text, primary_key=True),
    # A `DiagnosticRun` that has nothing else, in protobuf's own form.
    sa.Column("run", sa.LargeBinary, nullable=False),
)

# Of each job's steps by hour, attempt and layout, for months; and up to which row of `steps` and
# which hour they have been put together.
HOURS = sa.Table(
    "hours",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("begun_s", sa.Double, primary_key=True),
    sa.Column("attempt", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("layout", sa.Text, nullable=False),
    sa.Column("num_steps", sa.BigInteger, nullable=False),
    sa.Column("tokens", sa.BigInteger, nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Column("step_s", sa.Double, nullable=False),
    sa.Column("spread_s", sa.Double),
    sa.Column("late_s", sa.Double),
)
HOURS_READ = sa.Table(
    "hours_read",
    METADATA,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("version", sa.BigInteger, nullable=False),
    sa.Column("until_s", sa.Double, nullable=False),
)

# What each node was like among those of its jobs, by day: sums over the windows of the day.
NODE_DAYS = sa.Table(
    "node_days",
    METADATA,
    sa.Column("node_id", sa.Text, primary_key=True),
    sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("num_windows", sa.BigInteger, nullable=False),
    sa.Column("num_slowest", sa.BigInteger, nullable=False),
    sa.Column("expected_slowest", sa.Double, nullable=False),
    sa.Column("ratios", sa.Double, nullable=False),
    sa.Column("lasts", sa.Double, nullable=False),
    sa.Column("service_s", sa.Double, nullable=False),
)

# What healthy measurements between nodes were worth.
FLEET_BASELINES = sa.Table(
    "fleet_baselines",
    METADATA,
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("document", sa.Text, nullable=False),
)


class DatabaseError(FatalError):
    """The controller's database cannot be used; nothing may be decided without it."""


class DiskFullError(DatabaseError):
    """There is no room for what was to be written; nothing of it was."""


# What SQLite says when a write, or its shared memory, finds no room.
_FULL_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
# What it says of any other error of a write, a used-up quota and a limit of file sizes among them,
# and when it cannot make a file beside the database.
_PERHAPS_FULL_CODES = (
    sqlite3.SQLITE_IOERR_WRITE,
    sqlite3.SQLITE_IOERR_FSYNC,
    sqlite3.SQLITE_IOERR_TRUNCATE,
    sqlite3.SQLITE_CANTOPEN,
)
# A transaction writes a few pages at least.
_PROBE_BYTES = 2**20
# What a snapshot has made of the log is given back when the log is begun anew.
_LOG_BYTES = 8 * 2**20


def _make_private(path: Path) -> None:
    """It names jobs, paths and stores: for its owner only. SQLite's other files do as it does."""
    # What is wrong with the file, opening it says next.
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(handle, 0o600)
        finally:
            os.close(handle)


class Database:
    """An open database file. Closed by `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _make_private(path)
        self._engine = sa.create_engine(
            f"sqlite:///{path}", connect_args={"timeout": BUSY_TIMEOUT_MS / 1000}
        )
        event.listen(self._engine, "connect", _set_up_connection)
        event.listen(self._engine, "begin", _begin)
        try:
            self._connection = self._engine.connect()
        except SQLAlchemyError as error:
            self._engine.dispose()
            raise DatabaseError(f"{path}: cannot be opened: {_cause(error)}") from error
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Whatever was committed is there."""
        self._connection.close()
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """All or nothing; the write lock is held from the start.

        Raises:
            DatabaseError: the disk is full or broken, or the file is locked for too long.
        """
        try:
            with self._connection.begin():
                yield self._connection
        except SQLAlchemyError as error:
            kind = DiskFullError if self._is_full(error) else DatabaseError
            raise kind(f"{self._path}: {_cause(error)}") from error

    def shrink_log(self) -> None:
        """Give the disk back what a large transaction has made of the log, as far as possible."""
        # Not in a transaction, which SQLAlchemy would begin.
        driver = self._connection.connection.driver_connection
        assert driver is not None
        with contextlib.suppress(sqlite3.Error):
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _is_full(self, error: SQLAlchemyError) -> bool:
        code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
        if code in _PERHAPS_FULL_CODES:
            return not has_room(self._path.parent, _PROBE_BYTES)
        return code in _FULL_CODES

    def _prepare(self) -> None:
        with self.transaction() as connection:
            METADATA.create_all(connection)
            _add_missing_columns(connection)
            version = connection.execute(sa.select(CONTROLLER.c.schema_version)).scalar()
            if version is None:
                first = {"id": 1, "schema_version": SCHEMA_VERSION, "term": 0, "probed_s": 0.0}
                connection.execute(sa.insert(CONTROLLER), first)
            elif version > SCHEMA_VERSION:
                raise DatabaseError(
                    f"{self._path}: a newer version of Outlast wrote it (version {version} of the "
                    f"journal; this controller reads versions 1 to {SCHEMA_VERSION}); start that "
                    "version of Outlast again, or give another folder with --state-dir"
                )


def _add_missing_columns(connection: sa.Connection) -> None:
    """Those that tables of an older version lack. It takes no longer for many rows than for few,
    and an older controller goes on reading and writing the others."""
    present = {row.name for row in connection.exec_driver_sql("PRAGMA table_info(steps)")}
    if "split" not in present:
        connection.exec_driver_sql("ALTER TABLE steps ADD COLUMN split BLOB")


def _set_up_connection(connection: Any, _record: object) -> None:
    # The driver must not open transactions on its own: `_begin` does.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA journal_size_limit={_LOG_BYTES}")
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _cause(error: SQLAlchemyError) -> str:
    return str(getattr(error, "orig", None) or error)
