"""The journal in one SQLite file, which is what a controller has unless it is given another.

WAL with `synchronous=FULL` makes a commit one fsync; `BEGIN IMMEDIATE` takes the write lock
before the term is checked, so that check and append are one act.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import SQLAlchemyError

from controller.store.reserve import has_room

# Another process holds the write lock for one commit at most.
BUSY_TIMEOUT_MS = 5_000
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


class Sqlite:
    """A database in a file, which is made if it is not there."""

    has_sessions = False
    if_newer = "or give another folder with --state-dir"

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        return str(self._path)

    def make_engine(self) -> sa.Engine:
        """An engine on the file, which is its owner's only."""
        _make_private(self._path)
        engine = sa.create_engine(
            f"sqlite:///{self._path}", connect_args={"timeout": BUSY_TIMEOUT_MS / 1000}
        )
        event.listen(engine, "connect", _set_up_connection)
        event.listen(engine, "begin", _begin)
        return engine

    def is_full(self, error: SQLAlchemyError) -> bool:
        """Whether the disk is."""
        code = getattr(getattr(error, "orig", None), "sqlite_errorcode", None)
        if code in _PERHAPS_FULL_CODES:
            return not has_room(self._path.parent, _PROBE_BYTES)
        return code in _FULL_CODES

    def claim(self, connection: sa.Connection) -> None:
        """Nothing: the lock of the state directory does it."""

    def session(self, connection: sa.Connection) -> int:
        """There are none."""
        return 0

    def holder(self, connection: sa.Connection) -> int | None:
        """None: the lock goes with the process that has it, and with nothing else."""
        return None

    def end_holder(self, connection: sa.Connection, session: int) -> None:
        """Nothing: there are no sessions."""

    def insert(self, table: sa.Table) -> sqlite.Insert:
        """An insert with a clause for rows that are there."""
        return sqlite.insert(table)

    def shrink_log(self, connection: sa.Connection) -> None:
        """Cut the write-ahead log, as far as possible."""
        # Not in a transaction, which SQLAlchemy would begin.
        driver = connection.connection.driver_connection
        assert driver is not None
        with contextlib.suppress(sqlite3.Error):
            driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _make_private(path: Path) -> None:
    """It names jobs, paths and stores: for its owner only. SQLite's other files do as it does."""
    # What is wrong with the file, opening it says next.
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(handle, 0o600)
        finally:
            os.close(handle)


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
