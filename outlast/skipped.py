"""Steps whose batch is left out, because training on it gave NaN or Inf.

A step that is left out changes nothing but the step number. After a range of several was
left out, the states that an earlier attempt had reached within it are undone: they were
trained on batches that do not belong to the run any more. Controller and trainer follow
the same rule, so every attempt leaves out the same and resumes from the same history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRange:
    """Steps from `first` to `last`, both included, counted from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def is_skipped(ranges: Sequence[StepRange], step: int) -> bool:
    """Whether the batch of `step` is left out."""
    return any(each.first <= step <= each.last for each in ranges)


def is_undone(ranges: Sequence[StepRange], step: int) -> bool:
    """Whether a state after `step` may belong to a history that was given up.

    Nothing is saved at such a step any more. The last step of a range gave NaN or Inf in
    any attempt, so a state after it is of the history that leaves the range out.
    """
    return any(each.first <= step < each.last for each in ranges)


def num_skipped(ranges: Sequence[StepRange], step: int | None = None) -> int:
    """How many steps up to `step`, itself included, are left out; ranges may overlap.

    All of them, where no step is given.
    """
    count, end = 0, 0
    for each in sorted(ranges, key=lambda each: each.first):
        first, last = max(each.first, end + 1), each.last if step is None else min(each.last, step)
        count += max(0, last - first + 1)
        end = max(end, each.last)
    return count
