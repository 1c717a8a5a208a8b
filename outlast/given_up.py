"""Steps that a restart gave up and that are not redone yet, which a curve leaves out.

A job that goes back to an older state still has the reports of the steps behind it, from attempts
before. Each is replaced when its step is done again. Until then it belongs to no curve. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outlast.v1.common_pb2 import StepReport


def without_given_up(reports: Sequence[StepReport]) -> list[StepReport]:
    """The reports up to the newest step of the newest attempt, in their order."""
    newest = max(((each.attempt, each.step) for each in reports), default=(0, 0))[1]
    return [each for each in reports if each.step <= newest]
