"""The journal: every change the machine decided, in order, and the term of who may write.

Changes are only ever appended, one commit per batch. The term is raised by
compare-and-set when a controller starts and is checked in the transaction of
every append (`Database.write`): a deposed controller's write never lands. When the
changes have grown to a multiple of the last snapshot, the state itself is written as
the next one, a part at a time, and the changes that it holds are dropped.

What does not belong here: what they mean. Folding them is all that is done, and what a batch
changes as a whole is worked out in `core.batches`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from controller.core.batches import compacted
from controller.core.changes import State, StateChange, fold
from controller.core.codec import decode_change, encode_change
from controller.core.older_journals import Json
from controller.store.database import Database
from controller.store.tables import CHANGES, CONTROLLER, POISONED, SCHEMA_VERSION, SNAPSHOTS
from outlast.clock import Clock
from outlast.errors import FatalError

# A snapshot is written when the changes since the last one have grown to so many times its size,
# so that all snapshots together cost a fixed share of what is appended, however large the
# fleet; and a start reads at most so many times the state itself.
SNAPSHOT_GROWTH = 2.0
# Folding so much takes well under a second.
SNAPSHOT_LEAST_BYTES = 4 * 2**20
# Changes of a snapshot that are encoded between two looks at what has come in, some 10 ms.
SNAPSHOT_SLICE_CHANGES = 500
# Rows read at once while folding: the memory of a start is that of the state.
_READ_ROWS = 500


# Marks of events that were skipped; agents send nothing again that is older.
MAX_POISONED = 1_000


def encoded(change: StateChange) -> str:
    """A change as a row of the journal has it."""
    return json.dumps(encode_change(change))


class UnreadableJournalError(FatalError):
    """The journal has something that this version does not know, or is damaged."""


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _unreadable(where, error) from error


def _decoded(data: Json, where: str) -> StateChange:
    try:
        return decode_change(data)
    except ValueError as error:
        raise _unreadable(where, error) from error
    except KeyError as error:
        raise _unreadable(where, f"it has no {error}") from error


def _unreadable(where: str, why: ValueError | str) -> UnreadableJournalError:
    return UnreadableJournalError(
        f"journal: {where} cannot be read: {why}; this controller reads versions 1 to "
        f"{SCHEMA_VERSION} of the journal. Start the version of Outlast that wrote it, or "
        "restore a copy of the state directory"
    )


def _mark_version(connection: sa.Connection) -> None:
    """From now on the journal has rows of this version; those of older ones stay as they are."""
    connection.execute(
        sa.update(CONTROLLER)
        .where(CONTROLLER.c.schema_version < SCHEMA_VERSION)
        .values(schema_version=SCHEMA_VERSION)
    )


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A snapshot of which a part is encoded."""

    # It holds every change up to this one.
    seq: int
    changes: list[StateChange]
    # What had gathered by then.
    bytes_then: int
    encoded: list[str] = field(default_factory=list)


class Journal:
    """The journal of one controller, which writes under the term it took."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        snapshot_least_bytes: int = SNAPSHOT_LEAST_BYTES,
        on_commit: Callable[[float], None] | None = None,
    ) -> None:
        """`on_commit` gets the seconds that each append took."""
        self._database = database
        self._clock = clock
        self._least_bytes = snapshot_least_bytes
        self._on_commit = on_commit
        # Of the changes that no snapshot holds, and of the last snapshot.
        self._bytes_since = 0
        self._snapshot_bytes = 0
        self._draft: _Draft | None = None
        # What had gathered when a snapshot was given up.
        self._given_up_bytes = 0
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
        self.term = self._database.raise_term(known)

    def load(self) -> State:
        """The state that the journal describes.

        Raises:
            UnreadableJournalError: a row is no change of this version.
        """
        with self._database.transaction() as connection:
            snapshot = connection.execute(
                sa.select(SNAPSHOTS.c.seq, SNAPSHOTS.c.facts).order_by(SNAPSHOTS.c.seq.desc())
            ).first()
            self._snapshot_bytes = 0 if snapshot is None else len(snapshot.facts)
            self._bytes_since = self._given_up_bytes = 0
            return fold(self._read(connection, snapshot))

    def _read(
        self, connection: sa.Connection, snapshot: sa.Row[Any, Any] | None
    ) -> Iterator[StateChange]:
        """The changes of a snapshot and those after it, a few at a time."""
        begun = 0
        if snapshot is not None:
            begun = snapshot.seq
            where = f"the snapshot at row {begun}"
            for data in _parsed(snapshot.facts, where):
                yield _decoded(data, where)
        rows = connection.execute(
            sa.select(CHANGES.c.seq, CHANGES.c.fact)
            .where(CHANGES.c.seq > begun)
            .order_by(CHANGES.c.seq)
        ).yield_per(_READ_ROWS)
        for row in rows:
            self._bytes_since += len(row.fact)
            where = f"row {row.seq}"
            yield _decoded(_parsed(row.fact, where), where)

    def append(self, changes: Sequence[StateChange]) -> None:
        """Make these changes durable, all or none; what is written is their sum.

        Raises:
            DeposedError: another controller has taken over; nothing was written.
            DatabaseError: nothing was written.
        """
        started_s = time.monotonic()
        at_s = self._clock.now_s()
        texts = [encoded(change) for change in compacted(changes)]
        rows = [{"term": self.term, "at_s": at_s, "fact": text} for text in texts]
        with self._database.write() as connection:
            # What comes to nothing in all has no row, and an insert of none would add an empty one.
            if rows:
                _mark_version(connection)
                connection.execute(sa.insert(CHANGES), rows)
        self._bytes_since += sum(map(len, texts))
        if self._on_commit is not None:
            self._on_commit(time.monotonic() - started_s)

    @property
    def num_bytes(self) -> int:
        """What a controller that starts has to read: the snapshot and the changes after it."""
        return self._snapshot_bytes + self._bytes_since

    def snapshot_is_due(self) -> bool:
        """Whether enough has gathered since the last snapshot for another one."""
        least_bytes = max(self._least_bytes, SNAPSHOT_GROWTH * self._snapshot_bytes)
        if self._given_up_bytes:
            least_bytes = max(least_bytes, self._given_up_bytes + self._least_bytes)
        return self._draft is None and self._bytes_since >= least_bytes

    @property
    def is_writing_snapshot(self) -> bool:
        """Whether `continue_snapshot` has something to do."""
        return self._draft is not None

    def begin_snapshot(self, state: State) -> None:
        """Begin to replace every change so far by the state that they describe.

        `state` must be the fold of exactly what was appended. What is appended from now on
        stays beside the snapshot.
        """
        with self._database.write() as connection:
            newest = connection.execute(sa.select(sa.func.max(CHANGES.c.seq))).scalar()
        if newest is not None:
            changes = compacted(state.as_changes())
            self._draft = _Draft(seq=newest, changes=changes, bytes_then=self._bytes_since)

    def continue_snapshot(self) -> None:
        """Do a part of a snapshot that was begun; with the last part it is there."""
        draft = self._draft
        if draft is None:
            return
        changes = draft.changes[len(draft.encoded) : len(draft.encoded) + SNAPSHOT_SLICE_CHANGES]
        draft.encoded += map(encoded, changes)
        if len(draft.encoded) < len(draft.changes):
            return
        text = f"[{', '.join(draft.encoded)}]"
        values = {"term": self.term, "at_s": self._clock.now_s(), "facts": text}
        with self._database.write() as connection:
            _mark_version(connection)
            connection.execute(sa.insert(SNAPSHOTS), {"seq": draft.seq, **values})
            connection.execute(sa.delete(SNAPSHOTS).where(SNAPSHOTS.c.seq < draft.seq))
            connection.execute(sa.delete(CHANGES).where(CHANGES.c.seq <= draft.seq))
        self._snapshot_bytes = len(text)
        self._bytes_since -= draft.bytes_then
        self._given_up_bytes = 0
        self._draft = None

    def drop_snapshot(self) -> None:
        """Give up a snapshot that was begun, with what the log has grown by for it.

        It is tried again when more has gathered: until then it would fail the same way.
        """
        self._draft = None
        self._given_up_bytes = self._bytes_since
        self._database.shrink_log()

    def write_snapshot(self, state: State) -> None:
        """A whole snapshot at once."""
        self.begin_snapshot(state)
        while self.is_writing_snapshot:
            self.continue_snapshot()

    def mark_poisoned(self, source: str, event: str, error: str) -> None:
        """Note for good that a turn failed on an event, which is skipped from now on."""
        values = {"source": source, "event": event, "error": error}
        newest = sa.select(POISONED.c.seq).order_by(POISONED.c.seq.desc()).limit(MAX_POISONED)
        with self._database.write() as connection:
            connection.execute(
                sa.insert(POISONED), {"term": self.term, "at_s": self._clock.now_s(), **values}
            )
            connection.execute(sa.delete(POISONED).where(POISONED.c.seq.not_in(newest)))

    def poisoned_sources(self) -> list[str]:
        """Whose events were skipped: `source` of each mark, "" left out."""
        query = sa.select(POISONED.c.source).where(POISONED.c.source != "")
        with self._database.transaction() as connection:
            return list(connection.execute(query).scalars())

    def probe(self) -> None:
        """Write something that means nothing, to see whether the journal can be written.

        Raises:
            DeposedError, DatabaseError: it cannot.
        """
        with self._database.write() as connection:
            connection.execute(sa.update(CONTROLLER).values(probed_s=self._clock.now_s()))
