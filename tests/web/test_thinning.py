"""A thinned curve keeps what a person looks for."""

from __future__ import annotations

import gzip
import json
import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from controller.web.columns import PARTS, POINTS, columns_of
from controller.web.compression import LEVEL
from controller.web.thinning import kept_rows
from outlast.v1.common_pb2 import StepReport, StepSplit

LOSSES = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300)


@given(LOSSES, st.integers(2, 40), st.data())
def test_spikes_ends_and_what_is_asked_for_stay(
    losses: list[float], most: int, data: st.DataObject
) -> None:
    rows = st.integers(0, len(losses) - 1) if losses else st.nothing()
    always = data.draw(st.lists(rows, max_size=5)) if losses else []
    kept = kept_rows(losses, always, most)
    assert kept == sorted(set(kept))
    if len(losses) <= most:
        assert kept == list(range(len(losses)))
        return
    assert len(kept) <= most + 2 + len(always)
    assert {0, len(losses) - 1, *always} <= set(kept)
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite:
        shown = [losses[row] for row in kept]
        assert max(finite) in shown
        assert min(finite) in shown


def test_held_out_sets_have_columns_of_their_own() -> None:
    reports = [StepReport(step=step, tokens=1) for step in (1, 2)]
    assert not [name for name in columns_of(reports, 10) if "/" in name]
    reports.append(
        StepReport(step=3, tokens=1, eval_loss=2.0, eval_losses={"b": 3.0, "a": math.nan})
    )
    found = columns_of(reports, 10)
    assert found["eval_loss"] == [None, None, 2.0]
    sets = {name: values for name, values in found.items() if "/" in name}
    assert sets == {"eval/a/loss": [None] * 3, "eval/b/loss": [None, None, 3.0]}


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.integers(2, 60))
def test_evaluations_are_thinned_too_and_show_their_spikes(
    losses: list[float], points: int
) -> None:
    """With an evaluation every few steps, an answer would grow with the job."""
    reports = [
        StepReport(step=step, tokens=1, loss=1.0, eval_loss=loss)
        for step, loss in enumerate(losses, start=1)
    ]
    found = columns_of(reports, points)
    assert len(found["step"]) <= 1.5 * points + 6
    held_out = [loss for loss in found["eval_loss"] if loss is not None]
    assert max(held_out) == float(f"{max(losses):.6g}")
    assert min(held_out) == float(f"{min(losses):.6g}")
    assert found["step"][0] == 1
    assert found["step"][-1] == len(losses)


def test_a_curve_of_a_long_job_is_small_as_it_is_sent() -> None:
    """As the page asks for it, with noise in every column."""
    draw = Random(1).gauss
    reports = [
        StepReport(
            step=step,
            attempt=1,
            loss=draw(2, 0.1),
            grad_norm=draw(1, 0.1),
            learning_rate=3e-4 / step,
            tokens=4_194_304,
            duration_s=draw(10, 0.1),
            at_s=1.79e9 + draw(10 * step, 0.1),
            eval_loss=draw(2, 0.1) if step % 10 == 0 else None,
            split=StepSplit(**{part: draw(1, 0.1) for part in PARTS}),
        )
        for step in range(1, 20_001)
    ]
    answer = json.dumps(columns_of(reports, POINTS), separators=(",", ":")).encode()
    assert len(gzip.compress(answer, LEVEL)) < 200_000


def test_values_have_as_many_digits_as_a_picture_needs() -> None:
    report = StepReport(
        step=1_234_567,
        tokens=4_194_304,
        loss=2.123456789,
        learning_rate=1.23456789e-5,
        duration_s=1.3,
        at_s=1_795_780_000.123456,
    )
    found = {name: values[0] for name, values in columns_of([report], 10).items()}
    assert (found["step"], found["loss"]) == (1_234_567, 2.12346)
    assert (found["learning_rate"], found["tokens_per_s"]) == (1.23457e-5, 3_226_390)
    # Points in time are not rounded to hours.
    assert found["at_s"] == 1_795_780_000.12


def test_evaluations_that_were_given_up_are_left_out_before_the_rest_is_thinned() -> None:
    """Attempt 1 came to step 400 with an evaluation at each; attempt 2 has redone 201 to 203."""
    reports = [
        StepReport(step=step, tokens=1, loss=1.0, eval_loss=float(step), attempt=1)
        for step in range(1, 401)
    ]
    for step in range(201, 204):
        reports[step - 1] = StepReport(step=step, tokens=1, loss=2.0, attempt=2)
    found = columns_of(reports, 20)
    assert max(int(step or 0) for step in found["step"]) == 203
    held_out = [value for value in found["eval_loss"] if value is not None]
    assert max(held_out) == 200.0
    assert len(found["step"]) <= 1.5 * 20 + 8
