"""Tables of texts and what they mean: the ends of workers, their logs, the kernel's log.

Order matters: the first rule of a table that fits wins, so narrow rules stand before wide
ones. Every rule carries samples that it must know and samples that it must leave alone; one
test runs those of all tables, and a new message from the field is added as a sample first.

What does not belong here: what is done about a text, and where texts are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Generic, TypeVar

Meaning = TypeVar("Meaning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[Meaning]):
    """One kind of text."""

    name: str
    pattern: re.Pattern[str]
    means: Meaning
    # Texts that this rule must be the first to fit, and texts that it must not fit.
    matches: tuple[str, ...]
    misses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Generic[Meaning]):
    """Rules in the order in which they are tried."""

    name: str
    # Raised with every change, so that an incident says by which table it is.
    version: int
    rules: tuple[Rule[Meaning], ...]

    def first(self, text: str) -> Rule[Meaning] | None:
        """The first rule that `text` fits."""
        return next((rule for rule in self.rules if rule.pattern.search(text)), None)

    def cite(self, rule: str) -> str:
        """Which rule of which table, for the words of an incident."""
        return f"rule {rule!r} of table {self.version}"
