"""When the values that a rank still holds may be gone on with in its next attempt."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.restore.restore import SealedStep
from outlast.spec.parse import parse_spec
from tests.contracts import contract_of
from trainer.optim.lamb import FlatLamb
from trainer.worker.assignment import Assignment
from trainer.worker.kept import Kept


def kept(*, level: int = 0, has_master: bool = False, optimizer: object = None) -> Kept:
    """Of an attempt whose loop has completed step 7."""
    forgotten: list[bool] = []
    flat: Any = SimpleNamespace(
        level=level, has_master=has_master, forget=lambda: forgotten.append(True)
    )
    body: Any = SimpleNamespace(flat=flat, optimizer=optimizer)
    mesh: Any = SimpleNamespace(disconnect=lambda: None)
    loop: Any = SimpleNamespace(present_step=7)
    it = Kept()
    it.keep(mesh, body)
    it.follow(loop)
    return it


def test_the_step_that_was_completed_is_held_until_it_is_asked_for() -> None:
    it = kept()
    it.leave(3, is_void=False)
    assert it.take_present() == SealedStep(7, 3)
    assert it.take_present() is None


@pytest.mark.parametrize(
    ("how", "is_held"),
    [
        ({}, True),
        ({"level": 1, "has_master": True}, True),
        # Other ranks write into the memory of what the optimizer changes.
        ({"level": 1}, False),
        # An update needs norms of other ranks.
        ({"optimizer": FlatLamb.__new__(FlatLamb)}, False),
    ],
)
def test_what_an_abort_may_have_spoilt_is_not_held(how: dict[str, Any], is_held: bool) -> None:
    it = kept(**how)
    it.leave(3, is_void=True)
    assert (it.take_present() is not None) is is_held
    sound = kept(**how)
    sound.leave(3, is_void=False)
    assert sound.take_present() is not None


def test_values_of_an_attempt_that_failed_by_itself_are_not_held() -> None:
    it = kept()
    it.distrust()
    it.leave(3, is_void=False)
    assert it.take_present() is None


def test_an_attempt_without_a_step_holds_none() -> None:
    it = kept()
    it.leave(3, is_void=False)
    # The next one is left before it trains.
    it.leave(4, is_void=False)
    assert it.take_present() is None


def test_another_part_drops_all(tmp_path: Path) -> None:
    it = kept()
    spec = parse_spec({"name": "a"}).model_dump_json()
    first, second = (
        Assignment.of(contract_of(tmp_path, rank, world_size=2, spec_json=spec)) for rank in (0, 1)
    )
    it.prepare(first)
    assert it.body is None
    again = kept()
    again.prepare(first)
    again.keep(again.mesh or SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    again.prepare(first)
    assert again.body is not None
    again.prepare(second)
    assert again.body is again.mesh is again.saver is None
