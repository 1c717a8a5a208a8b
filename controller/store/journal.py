"""The journal: every fact the machine decided, in order, and the term of who may write.

Facts are only ever appended, one commit per batch. The term is raised by
compare-and-set when a controller starts and is checked in the transaction of
every append: a deposed controller's write never lands. Now and then the state
itself is written as a snapshot, and the facts that it holds are dropped.

What does not belong here: what facts mean. Folding them is all that is done.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import sqlalchemy as sa

from controller.core.codec import decode_fact, encode_fact
from controller.core.facts import Fact, State, fold
from controller.store.database import CONTROLLER, FACTS, SNAPSHOTS, Database
from outlast.clock import Clock
from outlast.errors import FatalError

# Folding this many facts takes well under a second.
SNAPSHOT_EVERY = 2_000


class DeposedError(FatalError):
    """Another controller has taken over; this one must not write or act any more."""


class Journal:
    """The journal of one controller, which writes under the term it took."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        snapshot_every: int = SNAPSHOT_EVERY,
        on_commit: Callable[[float], None] | None = None,
    ) -> None:
        """`on_commit` is told how many seconds each append took."""
        self._database = database
        self._clock = clock
        self._snapshot_every = snapshot_every
        self._on_commit = on_commit
        self._since_snapshot = 0
        self.term = 0

    def take_over(self) -> int:
        """Raise the term, which deposes whoever wrote before; the new term.

        Raises:
            DeposedError: another controller did the same in this very moment.
        """
        with self._database.transaction() as connection:
            term: int = connection.execute(sa.select(CONTROLLER.c.term)).scalar_one()
        self.raise_term(term)
        return self.term

    def raise_term(self, known: int) -> None:
        """Take the term after `known`, if `known` is still the present one.

        Raises:
            DeposedError: it is not.
        """
        with self._database.transaction() as connection:
            raised = connection.execute(
                sa.update(CONTROLLER).where(CONTROLLER.c.term == known).values(term=known + 1)
            )
            if raised.rowcount != 1:
                raise DeposedError(f"journal: another controller took the term after {known}")
        self.term = known + 1

    def load(self) -> State:
        """The state that the journal describes."""
        with self._database.transaction() as connection:
            snapshot = connection.execute(
                sa.select(SNAPSHOTS.c.seq, SNAPSHOTS.c.facts).order_by(SNAPSHOTS.c.seq.desc())
            ).first()
            begun = 0 if snapshot is None else snapshot.seq
            rows = connection.execute(
                sa.select(FACTS.c.fact).where(FACTS.c.seq > begun).order_by(FACTS.c.seq)
            ).all()
        facts = [] if snapshot is None else [decode_fact(fact) for fact in json.loads(snapshot[1])]
        facts.extend(decode_fact(json.loads(row.fact)) for row in rows)
        self._since_snapshot = len(rows)
        return fold(facts)

    def append(self, facts: Sequence[Fact]) -> None:
        """Make these facts durable, all or none.

        Raises:
            DeposedError: another controller has taken over; nothing was written.
            DatabaseError: nothing was written.
        """
        started_s = time.monotonic()
        at_s = self._clock.now_s()
        rows = [
            {"term": self.term, "at_s": at_s, "fact": json.dumps(encode_fact(fact))}
            for fact in facts
        ]
        with self._database.transaction() as connection:
            self._check_term(connection)
            connection.execute(sa.insert(FACTS), rows)
        self._since_snapshot += len(rows)
        if self._on_commit is not None:
            self._on_commit(time.monotonic() - started_s)

    def snapshot_is_due(self) -> bool:
        """Whether enough facts have gathered since the last snapshot."""
        return self._since_snapshot >= self._snapshot_every

    def write_snapshot(self, state: State) -> None:
        """Replace every fact so far by the state that they describe.

        `state` must be the fold of exactly what was appended.
        """
        facts = json.dumps([encode_fact(fact) for fact in state.as_facts()])
        with self._database.transaction() as connection:
            self._check_term(connection)
            newest = connection.execute(sa.select(sa.func.max(FACTS.c.seq))).scalar()
            if newest is None:
                return
            connection.execute(
                sa.insert(SNAPSHOTS),
                {"seq": newest, "term": self.term, "at_s": self._clock.now_s(), "facts": facts},
            )
            connection.execute(sa.delete(SNAPSHOTS).where(SNAPSHOTS.c.seq < newest))
            connection.execute(sa.delete(FACTS).where(FACTS.c.seq <= newest))
        self._since_snapshot = 0

    def probe(self) -> None:
        """Write something that means nothing, to see whether the journal can be written.

        Raises:
            DeposedError, DatabaseError: it cannot.
        """
        with self._database.transaction() as connection:
            self._check_term(connection)
            connection.execute(sa.update(CONTROLLER).values(probed_s=self._clock.now_s()))

    def _check_term(self, connection: sa.Connection) -> None:
        present: int = connection.execute(sa.select(CONTROLLER.c.term)).scalar_one()
        if present != self.term:
            raise DeposedError(
                f"journal: term {present} has begun, this controller wrote in term {self.term}; "
                "it stops, the newer one goes on"
            )
