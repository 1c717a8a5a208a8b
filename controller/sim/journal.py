"""The journal of a simulated controller: what survives, and who may write.

As `controller.store.journal` does, an append names its writer's term, and checking it is one
with writing: what a deposed leader appends never lands.
"""

from __future__ import annotations

import json

from controller.core.codec import decode_fact, encode_fact
from controller.core.facts import Fact, State, fold

# Facts kept one by one; weeks of a large fleet have millions.
MAX_FACTS = 200_000


class DeposedError(Exception):
    """Another controller has taken a later term."""


class Journal:
    """Decoded facts, and what they fold into."""

    def __init__(self, *, codec_every: int) -> None:
        # As read back from its text, which nothing else survives a crash in.
        self.facts: list[Fact] = []
        # What folding the facts gives. Kept up with each append and compared with the
        # machine's own state; a restart does not use it but folds the facts.
        self.folded = State()
        self.term = 0
        self.num_facts = 0
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

    def decoded(self, fact: Fact) -> Fact:
        """The fact as a restart would read it; of a large fleet's facts, one in so many."""
        self.num_facts += 1
        if self.num_facts % self._codec_every:
            return fact
        return decode_fact(json.loads(json.dumps(encode_fact(fact))))

    def append(self, fact: Fact, decoded: Fact) -> None:
        """Write a fact; `check` comes first."""
        self.facts.append(decoded)
        # Equal to the decoded one, and quick to compare with what the machine holds.
        self.folded.apply(fact)
        if len(self.facts) > MAX_FACTS:
            # As the real one does: a snapshot takes the place of what led to it.
            self.facts = self.folded.as_facts()

    def fold(self) -> State:
        """What a controller that starts knows."""
        return fold(self.facts)
