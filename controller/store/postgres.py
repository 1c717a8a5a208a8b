"""The journal in a PostgreSQL database, which outlives the controller's machine.

One connection, direct and not through a pool that gives it to others: a lock of this session keeps
a second controller off, and goes with the connection. It is for order only. What keeps a deposed
controller from writing is the row of the term, which each write locks and reads.

Passwords are libpq's business (PGPASSFILE, PGPASSWORD, or `passfile` in the URL): a URL with one is
refused, as command lines are everybody's to read, and no message shows one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from controller.store.backend import DatabaseError, DatabaseTakenError

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

_SCHEMES = ("postgresql", "postgresql+psycopg")
_SCHEME = _SCHEMES[-1]
# SQLSTATE of a disk without room.
_DISK_FULL = "53100"
# Of all controllers, in one database: "outlast" in ASCII.
_LOCK = 0x6F75746C617374
# The lock as the server lists it: both halves of the key apart.
_HELD = (
    "FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) "
    "AND classid::bigint = CAST(:key AS bigint) >> 32 "
    "AND objid::bigint = CAST(:key AS bigint) & 4294967295"
)
_HOLDER = sa.text(f"SELECT pid {_HELD}")
_END_HOLDER = sa.text(f"SELECT pg_terminate_backend(pid) {_HELD} AND pid = :pid")
# Of a server that is not heard, libpq says so after about so long, and not after hours.
_CONNECT_ARGS: dict[str, object] = {
    "application_name": "outlast controller",
    "client_encoding": "utf8",
    "connect_timeout": 10,
    "keepalives_idle": 5,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
    # Of several hosts, the one that takes writes.
    "target_session_attrs": "read-write",
}
_SETTINGS = (
    # A controller that is stopped in the middle of a write must not hold the row of the term.
    # Reading a large journal takes long in one.
    "SET idle_in_transaction_session_timeout = '120s'",
    "SET lock_timeout = '10s'",
    "SET statement_timeout = '60s'",
    # The same for the server's end, which holds the lock of a controller whose machine is gone.
    "SET tcp_keepalives_idle = 5",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
    # What was committed must survive a crash; levels above `on` are the administrator's choice.
    "SELECT set_config('synchronous_commit', 'on', false) "
    "WHERE current_setting('synchronous_commit') = 'off'",
)


def parse_url(text: str) -> sa.URL:
    """The URL of a database.

    Raises:
        ValueError: it is none, or has a password; the message shows nothing of it.
    """
    allowed = f"{_SCHEME}://USER@HOST/DATABASE"
    try:
        url = sa.make_url(text)
    except (ArgumentError, ValueError):
        raise ValueError(f"--journal is not a URL; allowed: {allowed}") from None
    if url.drivername not in _SCHEMES or not url.database:
        raise ValueError(f"--journal is not a URL of a PostgreSQL database; allowed: {allowed}")
    if url.password is not None or any("password" in name.lower() for name in url.query):
        raise ValueError(
            "--journal has a password in its URL, where others can read it; allowed: "
            f"{allowed}, and the password in PGPASSWORD or in the file that PGPASSFILE names "
            "(?passfile=FILE in the URL)"
        )
    return url.set(drivername=_SCHEME)


class Postgres:
    """A database of a PostgreSQL server."""

    has_sessions = True
    if_newer = "or give another database with --journal"

    def __init__(self, url: sa.URL) -> None:
        self._url = url

    @property
    def name(self) -> str:
        return self._url.render_as_string(hide_password=True)

    def make_engine(self) -> sa.Engine:
        """An engine on the database.

        Raises:
            DatabaseError: the driver is not installed.
        """
        arguments = {
            name: value for name, value in _CONNECT_ARGS.items() if name not in self._url.query
        }
        try:
            engine = sa.create_engine(
                self._url, connect_args=arguments, isolation_level="READ COMMITTED"
            )
        except ModuleNotFoundError as error:
            raise DatabaseError(
                f"--journal: no driver for PostgreSQL ({error}); install it with "
                "`pip install outlast[postgres]`"
            ) from error
        event.listen(engine, "connect", _set_up_connection)
        return engine

    def is_full(self, error: SQLAlchemyError) -> bool:
        """Whether the server's disk is, and its transaction was undone for it."""
        return getattr(getattr(error, "orig", None), "sqlstate", None) == _DISK_FULL

    def claim(self, connection: sa.Connection) -> None:
        """Take the lock of this session.

        Raises:
            DatabaseError: the database cannot hold every text.
            DatabaseTakenError: another controller has it.
        """
        encoding = connection.execute(sa.text("SHOW server_encoding")).scalar_one()
        if encoding not in ("UTF8", b"UTF8"):
            raise DatabaseError(
                f"{self.name}: its encoding is {encoding}; allowed: UTF8 "
                "(`createdb --encoding UTF8 --template template0`)"
            )
        if not connection.execute(sa.select(sa.func.pg_try_advisory_lock(_LOCK))).scalar_one():
            raise DatabaseTakenError(
                f"{self.name}: another controller uses this database; stop it first, or give "
                "another database with --journal"
            )

    def session(self, connection: sa.Connection) -> int:
        """The server's process for this connection."""
        return int(connection.execute(sa.select(sa.func.pg_backend_pid())).scalar_one())

    def holder(self, connection: sa.Connection) -> int | None:
        """The server's process for the connection that has the lock."""
        return connection.execute(_HOLDER, {"key": _LOCK}).scalar()

    def end_holder(self, connection: sa.Connection, session: int) -> None:
        """End that connection, if it has the lock."""
        connection.execute(_END_HOLDER, {"key": _LOCK, "pid": session})

    def insert(self, table: sa.Table) -> postgresql.Insert:
        """An insert with a clause for rows that are there."""
        # With all its drivers: controllers whose journal is a file do without.
        from sqlalchemy.dialects import postgresql

        return postgresql.insert(table)

    def shrink_log(self, connection: sa.Connection) -> None:
        """Nothing: the log is the server's."""


def _set_up_connection(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for setting in _SETTINGS:
        cursor.execute(setting)
    cursor.close()
    # Else they would go with the transaction that they have begun.
    connection.commit()
