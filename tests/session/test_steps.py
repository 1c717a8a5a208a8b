"""Steps that a script reports, as its agent finds them in the black box."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from outlast.blackbox import Phase, Reader, StepRecord, Writer
from outlast.session.process import Session

STEP_S = 0.02


@pytest.fixture
def session(tmp_path: Path) -> Session:
    contract: Any = None
    box = Writer(tmp_path / "box", rank=0, world_size=1, attempt=1)
    return Session(contract=contract, box=box, settings={}, stop_signal=signal.Signals.SIGTERM)


def take(session: Session, step: int) -> None:
    began_ns = time.monotonic_ns()
    while time.monotonic_ns() < began_ns + 1e9 * STEP_S:
        pass
    session.step(
        StepRecord(
            step=step,
            loss=1.0,
            grad_norm=0.0,
            learning_rate=0.0,
            tokens=1,
            start_ns=began_ns,
            end_ns=time.monotonic_ns(),
            eval_loss=None,
        )
    )


def test_how_long_a_step_takes_is_there_though_no_part_of_it_is_named(
    tmp_path: Path, session: Session
) -> None:
    reader = Reader(tmp_path / "box")
    spent = []
    for step in range(1, 4):
        take(session, step)
        spent.append(reader.time_use().phases_s.get(Phase.STEP, 0.0))
    assert spent[1] >= STEP_S
    assert spent[2] - spent[1] >= STEP_S


def test_a_rank_that_goes_on_from_a_checkpoint_is_in_its_first_step(
    tmp_path: Path, session: Session
) -> None:
    session.resumed(7)
    present = Reader(tmp_path / "box").present()
    assert (present.phase, present.completed_step) == (Phase.STEP, 7)


def test_what_a_script_has_named_goes_on_when_a_step_is_complete_within_it(
    tmp_path: Path, session: Session
) -> None:
    """As of a `Trainer` that logs, evaluates and saves after one step."""
    reader = Reader(tmp_path / "box")
    session.turn_to(Phase.EVALUATION)
    take(session, 1)
    assert (reader.present().phase, reader.present().completed_step) == (Phase.EVALUATION, 1)
    session.turn_to(Phase.STEP)
    take(session, 2)
    assert reader.present().phase is Phase.STEP
