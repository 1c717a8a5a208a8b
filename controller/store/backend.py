"""What differs between the databases that can hold the journal, and how they fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from outlast.errors import FatalError

if TYPE_CHECKING:
    # Each with all its drivers: a controller imports that of its own database only.
    from sqlalchemy.dialects import postgresql, sqlite

Insert: TypeAlias = "sqlite.Insert | postgresql.Insert"


class DatabaseError(FatalError):
    """The controller's database cannot be used; nothing may be decided without it."""


class DiskFullError(DatabaseError):
    """There is no room for what was to be written; nothing of it was."""


class DatabaseTakenError(DatabaseError):
    """Another controller uses the database."""


class Backend(Protocol):
    """One kind of database."""

    @property
    def name(self) -> str:
        """What it is called in messages; no password is in it."""

    @property
    def has_sessions(self) -> bool:
        """Whether what `claim` keeps is a session's, which another one can end."""

    @property
    def if_newer(self) -> str:
        """What may be done where a newer version of Outlast has written it."""

    def make_engine(self) -> sa.Engine:
        """An engine whose transactions are durable once they are committed."""

    def is_full(self, error: SQLAlchemyError) -> bool:
        """Whether an error says that there is no room."""

    def claim(self, connection: sa.Connection) -> None:
        """Keep other controllers off, for as long as the connection lives.

        Raises:
            DatabaseTakenError: one is there.
        """

    def session(self, connection: sa.Connection) -> int:
        """The number of this session."""

    def holder(self, connection: sa.Connection) -> int | None:
        """That of the session that keeps others off; None when there is none."""

    def end_holder(self, connection: sa.Connection, session: int) -> None:
        """End that session, if it is still the one that keeps others off."""

    def insert(self, table: sa.Table) -> Insert:
        """An insert that can say what to do about rows that are there."""

    def shrink_log(self, connection: sa.Connection) -> None:
        """Give the disk back what a large transaction has made of the log, where that is ours."""


def cause_of(error: SQLAlchemyError) -> str:
    """What the driver says, in one line; without the statement, whose values are the users'."""
    return " ".join(str(getattr(error, "orig", None) or error).split())
