"""A change is made to what is, not to what was: an older record would undo what came between."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from controller.core.context import Context
from controller.core.incident_record import IncidentRecord
from controller.core.records import JobRecord, NodeRecord
from controller.sim.run import run_seed


class Origins:
    """Which record each was made of by `replace`."""

    def __init__(self) -> None:
        # Both are kept: a number that names a record must not come to name another.
        self._made_of: dict[int, tuple[object, object]] = {}

    def replace(self, record: Any, **changes: Any) -> Any:
        made = dataclasses.replace(record, **changes)
        self._made_of[id(made)] = (made, record)
        return made

    def of(self, record: object) -> Iterator[object]:
        """The record, what it was made of, what that was made of, and so on."""
        while True:
            yield record
            if id(record) not in self._made_of:
                return
            record = self._made_of[id(record)][1]


def _known(ctx: Context, record: JobRecord | NodeRecord | IncidentRecord) -> object:
    match record:
        case JobRecord():
            return ctx.state.jobs.get(record.job_id)
        case NodeRecord():
            return ctx.state.nodes.get(record.node)
        case IncidentRecord():
            return ctx.state.incidents.get(record.incident)


@pytest.mark.parametrize("seed", [23, 577, 783])
def test_no_change_is_made_to_an_older_record(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    origins, put = Origins(), Context.put
    for name, module in sys.modules.items():
        if name.startswith("controller.core.") and hasattr(module, "replace"):
            monkeypatch.setattr(module, "replace", origins.replace)

    def checked(self: Context, record: Any) -> Any:
        known = _known(self, record)
        assert known is None or known in origins.of(record), f"put of an older record: {record}"
        return put(self, record)

    monkeypatch.setattr(Context, "put", checked)
    run_seed(seed)


def test_origins_of_a_record_are_known() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Each:
        number: int

    origins, first = Origins(), Each(1)
    last = origins.replace(origins.replace(first, number=2), number=3)
    assert [each.number for each in origins.of(last)] == [3, 2, 1]  # type: ignore[attr-defined]  # of this test
    assert first in origins.of(last)
    assert Each(4) not in origins.of(last)
