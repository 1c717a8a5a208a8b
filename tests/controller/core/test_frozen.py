"""Replacing fields of records, as `dataclasses.replace` does."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

from controller.core.frozen import replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    first: int
    second: tuple[int, ...] = ()
    third: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Doubled:
    value: int
    double: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", 2 * self.value)


def test_other_fields_are_those_of_the_record() -> None:
    record = Record(first=1, second=(2,), third=[3])
    new = replace(record, second=(4, 5))
    assert new == dataclasses.replace(record, second=(4, 5))
    assert new.third is record.third
    assert record.second == (2,)
    with pytest.raises(dataclasses.FrozenInstanceError):
        new.first = 2  # type: ignore[misc]  # that it is refused is the point


def test_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="Record has no field 'fourth'"):
        replace(Record(first=1), fourth=4)  # type: ignore[call-arg]  # refused by mypy, too


def test_what_init_works_out_is_worked_out_again() -> None:
    assert replace(Doubled(1), value=2).double == 4
