"""What can be wrong with a job spec, and how it is said: field, value, what is allowed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

# Specs come from outside: however large a number is, so many divisions are tried.
_LARGEST_TRIED = 10_000
# More would not help a person choose.
_NUM_SHOWN = 12
# Values and names come from outside, and may be of any length.
_MAX_SHOWN = 60
# Problems beyond these are counted: a wrong file may have a hundred thousand.
MAX_PROBLEMS = 50

_Spec = TypeVar("_Spec")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldProblem:
    """One thing wrong with a spec: where, and what is allowed there."""

    field: str
    message: str


class SpecError(ValueError):
    """A spec that cannot run; `problems` holds every reason."""

    def __init__(self, problems: tuple[FieldProblem, ...]) -> None:
        if len(problems) > MAX_PROBLEMS:
            more = f"{len(problems) - MAX_PROBLEMS} more problems are not shown"
            problems = (*problems[:MAX_PROBLEMS], FieldProblem(field="(document)", message=more))
        self.problems = problems
        super().__init__(described("the job spec", problems))


def described(what: object, problems: Sequence[FieldProblem]) -> str:
    """Every problem of `what`, one a line."""
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"  {problem.field}: {problem.message}" for problem in problems]
    return "\n".join([f"{what} has {count}:", *lines])


class UnreadError(Exception):
    """A rule has looked at a field whose value could not be read, so it has nothing to say."""


class Unread:
    """The value of a field that could not be read.

    It lets the rules run that do not need the field, so that one mistake does not hide others.
    """

    __slots__ = ()

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise UnreadError

    __getattr__ = __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = __mod__ = __rmod__ = _refuse
    __int__ = __float__ = __index__ = __str__ = __format__ = _refuse


def collect(
    rules: Iterable[Callable[[_Spec], Iterable[FieldProblem]]], spec: _Spec
) -> list[FieldProblem]:
    """What every rule finds, those left out that would look at fields without a value."""
    found: list[FieldProblem] = []
    for rule in rules:
        try:
            found += rule(spec)
        except UnreadError:
            continue
    return found


def shown(value: object) -> str:
    """A value as a spec has it, cut where it is long."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(_cut(value))
        case int():
            # Python refuses to write the largest ones in decimals.
            is_short = value.bit_length() < 4 * _MAX_SHOWN
            return str(value) if is_short else f"a number of {value.bit_length()} bits"
        case float() if math.isnan(value):
            return ".nan"
        case float() if math.isinf(value):
            return ".inf" if value > 0 else "-.inf"
        case float():
            return repr(value)
        case Mapping():
            if not value:
                return "an empty section"
            return f"a section with {_cut(', '.join(map(name_of, list(value)[:8])))}"
        case list() | tuple():
            return _cut(f"[{', '.join(map(shown, value[:8]))}{', ...' if value[8:] else ''}]")
        case bytes() | set() | frozenset():
            return "data of a kind that no field has"
        case _:
            return _cut(str(value))


def name_of(key: object) -> str:
    """A key of a mapping as a spec has it, cut where it is long."""
    return _cut(key) if isinstance(key, str) and key.isprintable() and key else shown(key)


def _plain(value: object) -> str:
    """Words as they are, other values as a spec has them."""
    return value if isinstance(value, str) else shown(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


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


def multiples_beside(value: int, by: int) -> list[int]:
    """The multiples of `by` on both sides of `value`, those above 0."""
    below = value // by * by
    return [n for n in (below, below + by) if n > 0]


def changed(section: object) -> dict[str, object]:
    """Fields that differ from their defaults: a spec that was written out has them all."""
    defaults = type(section)()
    return {
        name: value
        for name, value in vars(section).items()
        if not isinstance(value, Unread) and value != getattr(defaults, name)
    }


def only_with(field: str, value: object, needed: str, given: object) -> FieldProblem:
    """`field` has a value that means nothing here."""
    return FieldProblem(
        field=field,
        message=f"is {_plain(value)}, which applies only with {needed}, not {_plain(given)}; "
        "leave it out",
    )
