"""What can be wrong with a job spec, and how it is said: field, value, what is allowed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

# Specs come from outside: however large a number is, so many divisions are tried.
_LARGEST_TRIED = 10_000
# More would not help a person choose.
_NUM_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """One thing wrong with a spec: where, and what is allowed there."""

    field: str
    message: str


class SpecError(ValueError):
    """A spec that cannot run; `problems` holds every reason."""

    def __init__(self, problems: tuple[FieldProblem, ...]) -> None:
        self.problems = problems
        lines = "\n".join(f"  {problem.field}: {problem.message}" for problem in problems)
        super().__init__(f"the job spec has {len(problems)} problem(s):\n{lines}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Divides:
    """A rule: `by` must divide the value of `field`."""

    field: str
    value: int
    by_name: str
    by: int

    def problems(self) -> list[FieldProblem]:
        """What is wrong, with the nearest values of both that would be right."""
        if self.value % self.by == 0:
            return []
        near = nearest_multiples(self.value, self.by)
        allowed = ", ".join(str(n) for n in closest(divisors(self.value), self.by))
        return [
            FieldProblem(
                field=self.field,
                message=f"is {self.value}, which {self.by_name} = {self.by} does not divide; "
                f"allowed near it: {near}, or {self.by_name} in {{{allowed}}}",
            )
        ]


@functools.lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of `number`, ascending.

    Above 10^8 not all of them: those up to 10,000, and what is left of `number` over each.
    """
    limit = min(math.isqrt(number), _LARGEST_TRIED)
    small = [n for n in range(1, limit + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def closest(values: Sequence[int], wanted: int, most: int = _NUM_SHOWN) -> list[int]:
    """Of `values` those that fewest doublings separate from `wanted`, ascending."""
    return sorted(sorted(values, key=lambda value: doublings(value, wanted))[:most])


def doublings(one: int, other: int) -> float:
    """How often the smaller of two counts must be doubled to give the larger."""
    # Not the logarithm of their quotient: that of large numbers is no float.
    return abs(math.log2(one) - math.log2(other))


def nearest_multiples(value: int, by: int) -> str:
    """The multiples of `by` on both sides of `value`, in words."""
    below = value // by * by
    return " or ".join(str(n) for n in (below, below + by) if n > 0)


def changed(section: object) -> dict[str, object]:
    """Fields that differ from their defaults: a spec that was written out has them all."""
    defaults = type(section)()
    return {
        name: value for name, value in vars(section).items() if value != getattr(defaults, name)
    }


def only_with(field: str, value: object, needed: str, given: object) -> FieldProblem:
    """`field` has a value that means nothing here."""
    return FieldProblem(
        field=field,
        message=f"is {value}, which applies only with {needed}, not {given}; leave it out",
    )
