"""A change is made to what is, not to what was: an older record would undo what came between."""

from __future__ import annotations

from operator import attrgetter

import pytest

from controller.core.context import Context
from controller.sim.run import run_seed


@pytest.mark.parametrize("seed", [23, 577, 783])
def test_no_change_is_made_to_an_older_record(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for put, table, key in (
        ("put_job", "jobs", "job_id"),
        ("put_incident", "incidents", "incident"),
        ("put_node", "nodes", "node"),
    ):
        monkeypatch.setattr(Context, put, _checked(put, table, attrgetter(key)))
    run_seed(seed)


def _checked(put: str, table: str, key: attrgetter[str]) -> object:
    unchecked = getattr(Context, put)

    def checked(self: Context, record: object, **changes: object) -> object:
        known = getattr(self.state, table).get(key(record))
        assert known is None or known == record, f"{put} of an older {key(record)}"
        return unchecked(self, record, **changes)

    return checked
