"""What the steps of a rank took by the measures of a heat map. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outlast.blackbox import StepPart, StepParts
from outlast.trace.heat import Measure

_PARTS = {
    Measure.FORWARD: StepPart.FORWARD,
    Measure.BACKWARD: StepPart.BACKWARD,
    Measure.DATA: StepPart.DATA,
    Measure.OPTIMIZER: StepPart.OPTIMIZER,
    Measure.CHECKPOINT: StepPart.CHECKPOINT,
    Measure.GARBAGE_COLLECTION: StepPart.GARBAGE_COLLECTION,
}

_OF_OPERATIONS = (Measure.WORK, Measure.WAITING)


def measured(
    steps: Sequence[StepParts], measure: Measure, most_steps: int, is_alone: bool = False
) -> dict[int, float]:
    """Seconds of the newest steps, in their order; none of what the rank does not note.

    A script may name no phase at all, or only some, and no operation. A rank that `is_alone` has
    nobody to wait for.
    """
    spent = {each.step: _ns_of(each, measure) for each in steps}
    if measure in _PARTS and not any(spent.values()):
        return {}
    if measure in _OF_OPERATIONS and not (is_alone or any(each.waited_ns for each in steps)):
        return {}
    return {step: spent[step] / 1e9 for step in [*spent][-most_steps:]}


def _ns_of(step: StepParts, measure: Measure) -> int:
    match measure:
        case Measure.STEP:
            return step.length_ns
        case Measure.WORK:
            return max(0, step.length_ns - step.waited_ns)
        case Measure.WAITING:
            # On a device an operation may go on behind the step.
            return min(step.length_ns, step.waited_ns)
        case _:
            return step.spent_ns[_PARTS[measure]]
