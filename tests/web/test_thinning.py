"""A thinned curve keeps what a person looks for."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from controller.web.columns import columns_of
from controller.web.thinning import kept_rows
from outlast.v1.common_pb2 import StepReport

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
