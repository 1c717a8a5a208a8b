"""Rules of where a job's checkpoints lie, and of what it begins with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, only_with
from outlast.rules.places import wrong_with_place

if TYPE_CHECKING:
    from outlast.spec import JobSpec


def _check_url(spec: JobSpec) -> list[FieldProblem]:
    """A place means the same on every node."""
    if spec.checkpoint.url is None:
        return []
    wrong = wrong_with_place(spec.checkpoint.url, "checkpoints")
    return [] if wrong is None else [FieldProblem(field="checkpoint.url", message=wrong)]


def _check_load(spec: JobSpec) -> list[FieldProblem]:
    if spec.checkpoint.load is None:
        return []
    wrong = wrong_with_place(spec.checkpoint.load, "checkpoints/gpt-abc12")
    return [] if wrong is None else [FieldProblem(field="checkpoint.load", message=wrong)]


def _check_load_step(spec: JobSpec) -> list[FieldProblem]:
    """Another job's checkpoint has a next step."""
    step, weights_only = spec.checkpoint.load_step, spec.checkpoint.load_weights_only
    if spec.checkpoint.load is None:
        given = (("load_step", step), ("load_weights_only", weights_only))
        return [
            only_with(f"checkpoint.{name}", value, "checkpoint.load", "none")
            for name, value in given
            if value
        ]
    if step is None or step < spec.steps or weights_only:
        return []
    allowed = f"1 to {spec.steps - 1}" if spec.steps > 1 else "none"
    return [
        FieldProblem(
            field="checkpoint.load_step",
            message=f"is {step}; allowed: {allowed}, so that steps = {spec.steps} "
            "leaves some to train",
        )
    ]


RULES = (_check_url, _check_load, _check_load_step)
