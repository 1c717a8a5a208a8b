"""Rules of the optimizer, its schedule and the precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outlast.problems import FieldProblem, changed, only_with

if TYPE_CHECKING:
    from outlast.spec import JobSpec


def _check_loss_scale(spec: JobSpec) -> list[FieldProblem]:
    scale = spec.loss_scale
    if spec.precision != "fp16":
        return [
            only_with(f"loss_scale.{name}", value, "precision = fp16", spec.precision)
            for name, value in changed(scale).items()
        ]
    if scale.initial >= scale.minimum:
        return []
    return [
        FieldProblem(
            field="loss_scale.initial",
            message=f"is {scale.initial:g}, below loss_scale.minimum = {scale.minimum:g}; "
            f"allowed: {scale.minimum:g} or more",
        )
    ]


def _check_schedule(spec: JobSpec) -> list[FieldProblem]:
    schedule = spec.optimizer.schedule
    if schedule.name == "constant" and "min_ratio" in changed(schedule):
        needed = "a schedule that decays (cosine, linear or wsd)"
        return [only_with("optimizer.schedule.min_ratio", schedule.min_ratio, needed, "constant")]
    if schedule.decay_steps is None:
        return []
    field = "optimizer.schedule.decay_steps"
    if schedule.name != "wsd":
        needed = "optimizer.schedule.name = wsd"
        return [only_with(field, schedule.decay_steps, needed, schedule.name)]
    most = spec.steps - schedule.warmup_steps
    if schedule.decay_steps <= most:
        return []
    return [
        FieldProblem(
            field=field,
            message=f"is {schedule.decay_steps}; after {schedule.warmup_steps} warm-up steps of "
            f"{spec.steps}, allowed: 1 to {max(1, most)}, or a longer job",
        )
    ]


def _check_lamb(spec: JobSpec) -> list[FieldProblem]:
    optimizer, bounds = spec.optimizer, spec.optimizer.lamb
    if optimizer.name != "lamb":
        return [
            only_with(f"optimizer.lamb.{name}", value, "optimizer.name = lamb", optimizer.name)
            for name, value in changed(bounds).items()
        ]
    if bounds.phi_max is None or bounds.phi_min < bounds.phi_max:
        return []
    return [
        FieldProblem(
            field="optimizer.lamb.phi_max",
            message=f"is {bounds.phi_max:g}; it must be more than optimizer.lamb.phi_min = "
            f"{bounds.phi_min:g}, or null",
        )
    ]


def _check_warmup(spec: JobSpec) -> list[FieldProblem]:
    """A warm-up that never ends; the default one may, in a job of a few steps."""
    schedule = spec.optimizer.schedule
    if schedule.warmup_steps <= spec.steps or "warmup_steps" not in changed(schedule):
        return []
    return [
        FieldProblem(
            field="optimizer.schedule.warmup_steps",
            message=f"is {schedule.warmup_steps}, longer than the job: the learning rate would "
            f"never reach optimizer.lr; allowed: 0 to steps = {spec.steps}",
        )
    ]


RULES = (_check_loss_scale, _check_schedule, _check_warmup, _check_lamb)
