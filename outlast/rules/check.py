"""Every rule that looks at several fields of a job spec.

Rules that a layout can break come with the layouts nearest to the wanted one that
would work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, UnreadError, collect
from outlast.rules import (
    checkpoint,
    data,
    elastic,
    job,
    layout,
    masked,
    model,
    sizes,
    training,
    workload,
)
from outlast.rules.nearest import nearest_layouts

if TYPE_CHECKING:
    from outlast.spec import JobSpec

# In the order in which problems are listed.
RULES = (
    *job.NAME,
    *sizes.RULES,
    *data.RULES,
    *checkpoint.RULES,
    *model.RULES,
    *masked.RULES,
    *layout.RULES,
    *training.RULES,
    *job.RULES,
)


def check(spec: JobSpec) -> list[FieldProblem]:
    """What is wrong between fields that are each fine alone.

    Rules that would look at a field that could not be read have nothing to say.
    """
    if workload.runs_script(spec):
        return collect((*job.NAME, *workload.RULES, *job.RULES), spec)
    problems = collect((*RULES, *workload.ALONE), spec)
    of_layout = collect(layout.RULES, spec)
    if not of_layout:
        # Sizes of a layout that does not work say nothing.
        return problems + collect((elastic.check,), spec)
    try:
        near = nearest_layouts(spec, RULES)
    except UnreadError:
        near = []
    if near:
        problems.append(
            FieldProblem(
                field="parallel",
                message=f"layouts that would work, nearest first: {'; '.join(near)}",
            )
        )
    return problems
