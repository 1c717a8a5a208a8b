"""A curve as columns, thinned to what a page can show. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from controller.web.messages import as_json
from controller.web.thinning import kept_rows
from outlast.given_up import without_given_up
from outlast.v1 import common_pb2

_ALL = range(2**63)
PARTS = tuple(field.name for field in common_pb2.StepSplit.DESCRIPTOR.fields)
# Unless others are asked for: some for each pixel of a chart, and up to 150 kB compressed.
POINTS = 1500
# A picture shows three or four; more digits than these are most of what an answer would weigh.
_DIGITS = 6
# Of a second: points in time have ten digits before it.
_PLACES = 2


def columns_of(
    reports: Sequence[common_pb2.StepReport], points: int, steps: range = _ALL
) -> dict[str, list[float | int | None]]:
    """Those of `steps` that were not given up as columns, up to one and a half times `points` rows,
    and a few.

    They show every spike of the loss, and of the held-out loss among those that were evaluated.
    Where the time of a step went is reported once for several short ones, with the last of them:
    here all of them have it.
    """
    # Before they are thinned, which may leave out the few steps of a new attempt.
    reports = [each for each in without_given_up(reports) if each.step in steps]
    evaluated = [row for row, each in enumerate(reports) if each.HasField("eval_loss")]
    divided = [row for row, each in enumerate(reports) if each.HasField("split")]
    # However often it was evaluated, the answer has so many rows.
    held_out = kept_rows([reports[row].eval_loss for row in evaluated], (), points // 2)
    always = [evaluated[at] for at in held_out]
    kept = kept_rows([each.loss for each in reports], always, points)
    rows = [_row(reports[row], _split_at(reports, divided, row)) for row in kept]
    sets = sorted({name for row in evaluated for name in reports[row].eval_losses})
    names = [*_row(common_pb2.StepReport(), None), *(f"eval/{name}/loss" for name in sets)]
    return {name: [_rounded(name, row.get(name)) for row in rows] for name in names}


def _rounded(name: str, value: float | None) -> float | None:
    if not isinstance(value, float):
        return value
    return round(value, _PLACES) if name == "at_s" else float(f"{value:.{_DIGITS}g}")


def _split_at(
    reports: Sequence[common_pb2.StepReport], divided: Sequence[int], row: int
) -> common_pb2.StepSplit | None:
    at = bisect_left(divided, row)
    if at == len(divided) or reports[divided[at]].attempt != reports[row].attempt:
        return None
    return reports[divided[at]].split


def _row(report: common_pb2.StepReport, split: common_pb2.StepSplit | None) -> dict[str, Any]:
    row: dict[str, Any] = as_json(report, ("split",))
    row |= {f"eval/{name}/loss": loss for name, loss in row.pop("eval_losses").items()}
    tokens = row.pop("tokens")
    row["tokens_per_s"] = tokens / report.duration_s if report.duration_s > 0 else None
    if not tokens:
        # Its batch was left out.
        row["loss"] = row["grad_norm"] = row["tokens_per_s"] = None
    row |= dict.fromkeys(PARTS) if split is None else as_json(split)
    return row
