"""Every rule that looks at several fields of a job spec.

Rules that a layout can break come with the layouts nearest to the wanted one that
would work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.problems import FieldProblem
from outlast.rules import checkpoint, elastic, job, layout, model, training
from outlast.rules.nearest import nearest_layouts

if TYPE_CHECKING:
    from outlast.spec import JobSpec


def check(spec: JobSpec) -> list[FieldProblem]:
    """What is wrong between fields that are each fine alone."""
    of_layout = layout.check(spec)
    problems = [
        *job.check_name(spec),
        *checkpoint.check(spec),
        *model.check(spec),
        *of_layout,
        *training.check(spec),
        *job.check_checkpoint(spec),
        *job.check_recovery(spec),
        # Sizes of a layout that does not work say nothing.
        *([] if of_layout else elastic.check(spec)),
        *job.check_detectors(spec),
    ]
    near = nearest_layouts(spec) if of_layout else []
    if near:
        problems.append(
            FieldProblem(
                field="parallel",
                message=f"layouts that would work, nearest first: {'; '.join(near)}",
            )
        )
    return problems
