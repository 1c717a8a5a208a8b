"""The journal of a simulated controller: what survives, and who may write.

As `controller.store.journal` does, an append names its writer's term, and checking it is one
with writing: what a deposed leader appends never lands. A batch is written as there, too: what
it changes as a whole, as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from controller.core.batches import compacted
from controller.core.changes import State, StateChange, fold
from controller.core.codec import decode_change, encode_change

# Changes kept one by one; weeks of a large fleet have millions.
MAX_CHANGES = 200_000


class DeposedError(Exception):
    """Another controller has taken a later term."""


class Journal:
    """Decoded changes, and what they fold into."""

    def __init__(self, *, codec_every: int) -> None:
        # As read back from its text, which nothing else survives a crash in.
        self.changes: list[StateChange] = []
        # What was decided folds into this. It is compared with the machine's own state, and with
        # what a restart makes of `changes`.
        self.folded = State()
        self.term = 0
        # Those that were decided, and those that were written for them.
        self.num_changes = self.num_written = 0
        self._codec_every = codec_every

    def take_term(self) -> int:
        """Become the only one who may write."""
        self.term += 1
        return self.term

    def check(self, term: int) -> None:
        """Part of an append.

        Raises:
            DeposedError: the writer's term is over.
        """
        if term != self.term:
            raise DeposedError(f"term {term} is over; {self.term} has begun")

    def append(self, changes: Sequence[StateChange]) -> Iterator[tuple[StateChange, StateChange]]:
        """Write a batch; `check` comes first. Each change as it was written, and as it is read.

        Who appends brings `folded` up to date, a change at a time.
        """
        self.num_changes += len(changes)
        for change in compacted(changes):
            self.num_written += 1
            read = self._read_back(change)
            self.changes.append(read)
            yield change, read

    def shorten(self) -> None:
        """As the real one does: a snapshot takes the place of what led to it."""
        if len(self.changes) > MAX_CHANGES:
            self.changes = self.folded.as_changes()

    def _read_back(self, change: StateChange) -> StateChange:
        """The change as a restart would read it; of a large fleet's changes, one in so many."""
        if self.num_written % self._codec_every:
            return change
        return decode_change(json.loads(json.dumps(encode_change(change))))

    def fold(self) -> State:
        """What a controller that starts knows."""
        return fold(self.changes)
