"""Rules that one count must divide another, with the values near them that would be right."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.problems import FieldProblem, closest, divisors, multiples_beside
from outlast.rules.sizes import LARGEST

# Of fields that have no limit of their own.
_LARGEST_OFFERED = max(LARGEST.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Divides:
    """A rule: `by` must divide the value of `field`."""

    field: str
    value: int
    by_name: str
    by: int

    def problems(self) -> list[FieldProblem]:
        """What is wrong, with the nearest values of both that would be right."""
        largest = LARGEST.get(self.field, _LARGEST_OFFERED)
        if self.value > largest or self.by > LARGEST.get(self.by_name, self.by):
            # Its size is a problem already, and what would divide it is of no use.
            return []
        if self.value % self.by == 0:
            return []
        near = [n for n in multiples_beside(self.value, self.by) if n <= largest]
        beside = f"near it: {' or '.join(map(str, near))}, or " if near else ""
        allowed = ", ".join(str(n) for n in closest(divisors(self.value), self.by))
        return [
            FieldProblem(
                field=self.field,
                message=f"is {self.value}, which {self.by_name} = {self.by} does not divide; "
                f"allowed{' ' if near else ': '}{beside}{self.by_name} in {{{allowed}}}",
            )
        ]
