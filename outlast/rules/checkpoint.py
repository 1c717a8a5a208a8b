"""Rules of what a job begins with."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, only_with

if TYPE_CHECKING:
    from outlast.spec import JobSpec

_IS_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*:")


def check(spec: JobSpec) -> list[FieldProblem]:
    """Another job's checkpoint has a place that means the same on every node, and a next step."""
    url, step = spec.checkpoint.load, spec.checkpoint.load_step
    if url is None:
        if step is None:
            return []
        return [only_with("checkpoint.load_step", step, "checkpoint.load", "none")]
    problems = []
    if not _IS_ABSOLUTE.match(url):
        problems.append(
            FieldProblem(
                field="checkpoint.load",
                message=f"is {url!r}; allowed: an absolute path or an fsspec URL such as "
                "file:///checkpoints/gpt-abc12 or s3://bucket/checkpoints/gpt-abc12",
            )
        )
    if step is not None and step >= spec.steps:
        problems.append(
            FieldProblem(
                field="checkpoint.load_step",
                message=f"is {step}; allowed: 1 to {spec.steps - 1}, so that steps = {spec.steps} "
                "leaves some to train",
            )
        )
    return problems
