"""The controller's database: transactions on it, and who may write.

Everything here runs in the controller's loop, on one connection and one thread: between what the
machine decides and what is durable, nobody can look. `write` checks the term and writes in one
transaction, with the row of the term locked: what a deposed controller writes never lands.

What a database has of its own is in `sqlite` and `postgres`; what is stored in the tables is the
business of `journal`, `curves` and `diagnoses`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from controller.store.backend import Backend, DatabaseError, DiskFullError, Insert, cause_of
from controller.store.postgres import Postgres
from controller.store.sqlite import Sqlite
from controller.store.tables import CONTROLLER, METADATA, SCHEMA_VERSION, STEPS
from outlast.errors import FatalError


class DeposedError(FatalError):
    """Another controller has taken over; this one must not write or act any more."""


class Database:
    """An open database. Closed by `close`."""

    def __init__(self, place: Path | sa.URL) -> None:
        """`place` is a file of SQLite's, or a database of PostgreSQL's."""
        self._backend: Backend = Sqlite(place) if isinstance(place, Path) else Postgres(place)
        # Under which `write` writes; 0 until one is taken.
        self._term = 0
        try:
            self._engine = self._backend.make_engine()
            self._connection = self._engine.connect()
        except SQLAlchemyError as error:
            raise DatabaseError(
                f"{self._backend.name}: cannot be opened: {cause_of(error)}"
            ) from error
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it. Whatever was committed is there."""
        self._connection.close()
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """All or nothing; for reading.

        Raises:
            DatabaseError: the disk is full or broken, the database is locked for too long, or it
                does not answer.
        """
        if self._connection.invalidated:
            # A new one would be without the lock that `claim` took.
            raise DatabaseError(f"{self._backend.name}: the connection to it was lost")
        try:
            with self._connection.begin():
                yield self._connection
        except SQLAlchemyError as error:
            kind = DiskFullError if self._backend.is_full(error) else DatabaseError
            raise kind(f"{self._backend.name}: {cause_of(error)}") from error

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """The same, for what only the controller of the present term may write.

        Raises:
            DeposedError: another has taken over; nothing is written.
            DatabaseError: as `transaction`.
        """
        with self.transaction() as connection:
            # Nobody raises it before this is committed. SQLite has the whole database locked.
            query = sa.select(CONTROLLER.c.term).with_for_update()
            present: int = connection.execute(query).scalar_one()
            if present != self._term:
                raise DeposedError(
                    f"journal: term {present} has begun, this controller wrote in term "
                    f"{self._term}; it stops, the newer one goes on"
                )
            yield connection

    def raise_term(self, known: int) -> int:
        """Take the term after `known`, if `known` is still the present one; the new term.

        Raises:
            DeposedError: it is not.
        """
        with self.transaction() as connection:
            raised = connection.execute(
                sa.update(CONTROLLER).where(CONTROLLER.c.term == known).values(term=known + 1)
            )
            if raised.rowcount != 1:
                raise DeposedError(f"journal: another controller took the term after {known}")
        self._term = known + 1
        return self._term

    def claim(self) -> None:
        """Keep other controllers off this database until it is closed.

        Raises:
            DatabaseTakenError: one is there.
        """
        with self.transaction() as connection:
            self._backend.claim(connection)

    @property
    def name(self) -> str:
        """What it is called in messages; no password is in it."""
        return self._backend.name

    @property
    def backend(self) -> Backend:
        """What is its kind's own."""
        return self._backend

    def insert(self, table: sa.Table) -> Insert:
        """An insert that can say what to do about rows that are there."""
        return self._backend.insert(table)

    def upsert(self, table: sa.Table) -> sa.Insert:
        """An insert that replaces rows with the same primary key."""
        insert = self.insert(table)
        changed = {
            column.name: insert.excluded[column.name]
            for column in table.columns
            if not column.primary_key
        }
        return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=changed)

    def shrink_log(self) -> None:
        """Give the disk back what a large transaction has made of the log, as far as possible."""
        self._backend.shrink_log(self._connection)

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
                    f"{self._backend.name}: a newer version of Outlast wrote it (version {version} "
                    f"of the journal; this controller reads versions 1 to {SCHEMA_VERSION}); start "
                    f"that version of Outlast again, {self._backend.if_newer}"
                )


def _add_missing_columns(connection: sa.Connection) -> None:
    """Those that tables of an older version lack. It takes no longer for many rows than for few,
    and an older controller goes on reading and writing the others."""
    present = {column["name"] for column in sa.inspect(connection).get_columns(STEPS.name)}
    if "split" not in present:
        kind = STEPS.c.split.type.compile(connection.dialect)
        connection.exec_driver_sql(f"ALTER TABLE steps ADD COLUMN split {kind}")
