"""`outlast curve`: each step once, whatever was done again."""

from __future__ import annotations

import csv
import io
import math
from contextlib import contextmanager
from typing import Any

import pytest

from outlast.cli import curve as module
from outlast.cli.curve import curve, rows_of
from outlast.cli.errors import CliError
from outlast.perplexity import perplexity
from outlast.v1.common_pb2 import StepReport


def report(step: int, attempt: int, **more: Any) -> StepReport:
    given = {"loss": 2.0, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens": 64, "duration_s": 0.5}
    return StepReport(step=step, attempt=attempt, **{**given, **more})


REPORTS = (
    report(1, 1),
    report(2, 2, loss=1.25, eval_loss=math.log(8)),
    report(3, 2, loss=math.nan, grad_norm=math.nan, tokens=0, duration_s=0.0),
    report(4, 1),
)


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def get(self, job_id: str, *, with_steps: bool) -> tuple[None, tuple[StepReport, ...]]:
            assert with_steps
            return None, REPORTS

    @contextmanager
    def controller_of(*_: object) -> Any:
        yield Client()

    class Job:
        job_id = "a"

    monkeypatch.setattr(module, "controller_of", controller_of)
    monkeypatch.setattr(module, "find_job", lambda *_: Job)


def test_a_step_that_is_to_be_redone_is_not_shown() -> None:
    assert [(row["step"], row["attempt"]) for row in rows_of(REPORTS)] == [(1, 1), (2, 2), (3, 2)]
    assert rows_of(()) == []


def test_held_out_sets_have_columns_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {"web": 1.0, "code": 3.0}
    reports = (report(1, 1), report(2, 1, eval_loss=2.0, eval_losses=sets))
    monkeypatch.setattr("tests.cli.test_curve.REPORTS", reports)
    curve(as_csv=True)
    first, second = csv.DictReader(io.StringIO(capsys.readouterr().out))
    names = [name for name in second if "/" in name]
    assert names == [
        *("held_out_loss/code", "held_out_perplexity/code"),
        *("held_out_loss/web", "held_out_perplexity/web"),
    ]
    assert [second[name] for name in ("held_out_loss", *names)] == [
        *("2.0", "3.0", str(perplexity(3.0)), "1.0", str(perplexity(1.0))),
    ]
    assert {first[name] for name in names} == {""}


def test_csv_has_each_step_once_under_its_own_names(capsys: pytest.CaptureFixture[str]) -> None:
    curve(as_csv=True)
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["train_loss"] for row in rows] == ["2.0", "1.25", ""]
    assert [row["held_out_loss"] for row in rows] == ["", repr(math.log(8)), ""]
    assert float(rows[1]["held_out_perplexity"]) == pytest.approx(8)


def test_a_table_names_both_losses(capsys: pytest.CaptureFixture[str]) -> None:
    curve()
    first, *rows = capsys.readouterr().out.splitlines()
    assert "TRAIN LOSS  HELD-OUT LOSS  PERPLEXITY" in first
    assert rows[1].split() == ["2", "1.2500", "2.0794", "8", "0.5", "0.001", "128"]
    assert rows[2].split()[1:5] == ["-", "-", "-", "-"]


def test_two_forms_at_once_are_refused() -> None:
    with pytest.raises(CliError, match="--csv and --json are both given"):
        curve(as_csv=True, json=True)


def test_a_perplexity_that_no_float_can_say_is_infinite() -> None:
    assert perplexity(1000.0) == math.inf
