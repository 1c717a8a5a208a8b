"""Which points of a job's curve a tracker has to be given. Pure.

A job's steps come as they are done, and again when they are redone after a fault. Redone ones have
the same numbers, to the bit, and are not news; where a batch was left out or a person let the job
go on elsewhere they have others, and all that a tracker has from there on no longer holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outlast.perplexity import perplexity

if TYPE_CHECKING:
    from outlast.v1.common_pb2 import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is known of one step."""

    step: int
    at_s: float
    """When it was done, since the epoch."""
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a tracker has not got yet."""

    points: tuple[Point, ...] = ()
    """In the order of their steps."""
    invalid_from: int | None = None
    """What the tracker has from this step on is to be forgotten first."""


@dataclass(slots=True)
class Curve:
    """What has been given to a tracker."""

    last_step: int = 0
    """The last step that it had before; nothing else is known of that time."""
    _values: dict[int, Mapping[str, float]] = field(default_factory=dict)

    def take(self, reports: Iterable[StepReport]) -> News:
        """What of these is news."""
        points: dict[int, Point] = {}
        invalid_from: int | None = None
        for report in reports:
            point = point_of(report)
            known = self._values.get(point.step)
            if known == point.values or (known is None and point.step <= self.last_step):
                continue
            if known is not None:
                # Those behind it went on from other weights.
                invalid_from = min(point.step, point.step if invalid_from is None else invalid_from)
                for step in [each for each in self._values if each >= point.step]:
                    del self._values[step]
                    points.pop(step, None)
            self._values[point.step] = point.values
            points[point.step] = point
        return News(
            points=tuple(points[step] for step in sorted(points)), invalid_from=invalid_from
        )


def point_of(report: StepReport) -> Point:
    """A report as a tracker shows it; a batch that was left out has no loss."""
    values: dict[str, float] = {}
    if report.tokens > 0:
        values["train/loss"] = report.loss
        values["train/grad_norm"] = report.grad_norm
        values["train/learning_rate"] = report.learning_rate
        if report.duration_s > 0:
            values["train/tokens_per_s"] = report.tokens / report.duration_s
    values["train/step_s"] = report.duration_s
    if report.HasField("eval_loss"):
        values["eval/loss"] = report.eval_loss
        values["eval/perplexity"] = perplexity(report.eval_loss)
    for name, loss in report.eval_losses.items():
        values[f"eval/{name}/loss"] = loss
        values[f"eval/{name}/perplexity"] = perplexity(loss)
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return Point(step=report.step, at_s=report.at_s, values=finite)
