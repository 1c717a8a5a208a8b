"""Which key each node has got a certificate for.

It is in the controller's database because both controllers of a pair must know it, and in a table
of its own because no decision of the machine depends on it. One controller writes it at a time, so
what is read once at the start stays true.
"""

from __future__ import annotations

import sqlalchemy as sa

from controller.access.enrollment import Certified
from controller.store.database import Database
from controller.store.tables import NODE_CERTIFICATES


class NodeCertificates:
    """The newest certificate of each node, while it holds."""

    def __init__(self, database: Database, now_s: float) -> None:
        self._database = database
        with database.transaction() as connection:
            rows = connection.execute(sa.select(NODE_CERTIFICATES)).all()
        self._known = {
            row.node_id: Certified(key=row.key, expires_s=row.expires_s)
            for row in rows
            if row.expires_s >= now_s
        }

    def __len__(self) -> int:
        return len(self._known)

    def get(self, node: str) -> Certified | None:
        """What a node has; None when nothing is on record."""
        return self._known.get(node)

    def put(self, node: str, record: Certified, now_s: float) -> None:
        """Put a certificate on record before its node gets it, and drop those that have expired.

        Raises:
            DatabaseError, DeposedError: it is not on record.
        """
        row = {"node_id": node, "key": record.key, "expires_s": record.expires_s}
        expired = NODE_CERTIFICATES.c.expires_s < now_s
        with self._database.write() as connection:
            connection.execute(sa.delete(NODE_CERTIFICATES).where(expired))
            connection.execute(self._database.upsert(NODE_CERTIFICATES), row)
        for gone in [name for name, each in self._known.items() if not each.holds(now_s)]:
            del self._known[gone]
        self._known[node] = record

    def drop(self, node: str) -> None:
        """Let a node get a certificate for another key.

        Raises:
            DatabaseError, DeposedError: it is on record still.
        """
        if node not in self._known:
            return
        with self._database.write() as connection:
            connection.execute(
                sa.delete(NODE_CERTIFICATES).where(NODE_CERTIFICATES.c.node_id == node)
            )
        del self._known[node]
