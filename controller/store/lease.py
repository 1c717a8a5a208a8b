"""The lease in a database that controllers of several machines share.

A lock of the database's keeps a second controller off, and stays with a leader that is frozen. So
the leader renews a lease beside it, and a controller that waits ends the session of a leader that
does not renew. What a deposed leader then still writes is refused by its lost session and the
term.
"""

from __future__ import annotations

import asyncio
import logging

import sqlalchemy as sa

from controller.core.lease import LEASE_S, RENEW_S, STARTING_S, LeaseWatch, Renewal
from controller.store.backend import DiskFullError
from controller.store.database import Database
from controller.store.tables import LEASE

logger = logging.getLogger(__name__)

# The rows: of the one that leads, and of those that have ended another's session.
_LEADER, _CHALLENGER = 1, 2


class Lease:
    """The lease of a database, for the one that leads and for one that waits."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._watch = LeaseWatch()

    def begin(self) -> None:
        """Take it, with time to read the journal; the database's lock is ours."""
        if self.database.can_end_others:
            with self.database.transaction() as connection:
                self._count_up(connection, _LEADER, STARTING_S)
                self._count_up(connection, _CHALLENGER, 0.0)

    async def keep(self) -> None:
        """Renew it for as long as this controller leads.

        Raises:
            DeposedError: another one leads.
            DatabaseError: the database does not answer, or the session was ended.
        """
        while True:
            if self.database.can_end_others:
                try:
                    with self.database.write() as connection:
                        self._count_up(connection, _LEADER, LEASE_S)
                except DiskFullError as error:
                    # One that waits could not write either, and finds that out first.
                    logger.debug("lease not renewed: %s", error)
            await asyncio.sleep(RENEW_S)

    def end_if_over(self, now_s: float) -> None:
        """End the leader's session if it has not renewed the lease; the lock is free then.

        Raises:
            DatabaseError: it may not be ended, or nothing can be written.
        """
        if not self.database.can_end_others:
            return
        with self.database.transaction() as connection:
            seen = _last(connection)
        # A leader of an older version renews nothing.
        if seen is None or not self._watch.is_over(seen, now_s):
            return
        logger.warning(
            "%s: the controller that uses it has not renewed its lease for %g s; its session is "
            "ended",
            self.database.name,
            seen.limit_s,
        )
        self._watch = LeaseWatch()
        # Committed first: a controller that cannot write this could not lead either.
        with self.database.transaction() as connection:
            self._count_up(connection, _CHALLENGER, 0.0)
        with self.database.transaction() as connection:
            # Meanwhile it may have been renewed, or another one that waited may lead.
            if _last(connection) == seen:
                self.database.end_other(connection)

    def _count_up(self, connection: sa.Connection, row: int, limit_s: float) -> None:
        insert = self.database.insert(LEASE)
        connection.execute(
            insert.on_conflict_do_update(
                index_elements=[LEASE.c.id],
                set_={"renewals": LEASE.c.renewals + 1, "limit_s": insert.excluded.limit_s},
            ),
            {"id": row, "renewals": 1, "limit_s": limit_s},
        )


def _last(connection: sa.Connection) -> Renewal | None:
    query = sa.select(LEASE.c.renewals, LEASE.c.limit_s).where(LEASE.c.id == _LEADER)
    row = connection.execute(query).first()
    return None if row is None else Renewal(renewals=row.renewals, limit_s=row.limit_s)
