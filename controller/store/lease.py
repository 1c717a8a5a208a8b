"""The lease in a database that controllers of several machines share.

A lock of the database's keeps a second controller off, and stays with a leader that is frozen. So
the leader renews a lease beside it, and a controller that waits ends the session of a leader that
does not renew. What a deposed leader then still writes is refused by its lost session and the term.
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
        self._backend = database.backend
        self._watch = LeaseWatch()

    def take(self) -> None:
        """Claim the database, and the lease with time to read the journal.

        Raises:
            DatabaseTakenError: another controller has it.
            DatabaseError: it does not answer.
        """
        self.database.claim()
        if self._backend.has_sessions:
            with self.database.transaction() as connection:
                self._write(connection, _LEADER, STARTING_S)
                self._write(connection, _CHALLENGER, 0.0)

    async def keep(self) -> None:
        """Renew it for as long as this controller leads.

        Raises:
            DeposedError: another one leads.
            DatabaseError: the database does not answer, or the session was ended.
        """
        while True:
            if self._backend.has_sessions:
                try:
                    with self.database.write() as connection:
                        self._write(connection, _LEADER, LEASE_S)
                except DiskFullError as error:
                    # One that waits could not write either, and finds that out first.
                    logger.debug("lease not renewed: %s", error)
            await asyncio.sleep(RENEW_S)

    def end_if_over(self, now_s: float) -> None:
        """End the leader's session if it has not renewed the lease; the lock is free then.

        Raises:
            DatabaseError: it may not be ended, or nothing can be written.
        """
        if not self._backend.has_sessions:
            return
        with self.database.transaction() as connection:
            seen = self._seen(connection)
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
            self._write(connection, _CHALLENGER, 0.0)
        with self.database.transaction() as connection:
            # Meanwhile it may have been renewed, or another one that waited may lead.
            if self._seen(connection) == seen:
                self._backend.end_holder(connection, seen.holder)

    def _seen(self, connection: sa.Connection) -> Renewal | None:
        """The leader's last renewal; None where it has not renewed: there is none, it has just
        claimed the database, or it is of an older version."""
        holder = self._backend.holder(connection)
        row = connection.execute(sa.select(LEASE).where(LEASE.c.id == _LEADER)).first()
        if row is None or row.holder != holder:
            return None
        return Renewal(holder=row.holder, renewals=row.renewals, limit_s=row.limit_s)

    def _write(self, connection: sa.Connection, row: int, limit_s: float) -> None:
        insert = self.database.insert(LEASE)
        changed = {
            "holder": insert.excluded.holder,
            "renewals": LEASE.c.renewals + 1,
            "limit_s": insert.excluded.limit_s,
        }
        connection.execute(
            insert.on_conflict_do_update(index_elements=[LEASE.c.id], set_=changed),
            {
                "id": row,
                "holder": self._backend.session(connection),
                "renewals": 1,
                "limit_s": limit_s,
            },
        )
