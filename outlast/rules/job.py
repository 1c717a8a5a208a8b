"""Rules of the job's name, of its checkpoints, of recovery and of detectors."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from outlast.ids import NAME_PATTERN
from outlast.problems import FieldProblem, only_with, shown

if TYPE_CHECKING:
    from outlast.spec import JobSpec

# Half of the shortest that healthy nodes are tested with under faults on a busy machine
# (`tests/chaos`: 20 s, 40 s and 5 s; `tests/test_demo.py` for heartbeats), or less.
_BUSY = "a healthy agent may be held up by a busy machine"
_LEAST_S = {
    "heartbeat_period_s": (0.25, "the controller hears every node so often"),
    "heartbeat_late_s": (0.75, _BUSY),
    "heartbeat_lost_s": (1.5, _BUSY),
    "heartbeat_silent_s": (4.0, _BUSY),
    "hang_timeout_s": (10.0, "a healthy rank may stand for seconds (a busy disk, an evaluation)"),
    "first_step_timeout_s": (10.0, "ranks take seconds to start"),
    "stop_timeout_s": (2.0, "ranks that are stopped keep their present step first"),
}


def _check_name(spec: JobSpec) -> list[FieldProblem]:
    """A name must fit into the names of everything that is made for the job."""
    # A name that could not be read says so when it is looked at, and not to a pattern.
    if spec.name and NAME_PATTERN.fullmatch(spec.name):
        return []
    return [
        FieldProblem(
            field="name",
            message=f"is {shown(spec.name)}; allowed: 1 to 53 lower-case letters, digits and '-', "
            "starting and ending with a letter or digit",
        )
    ]


def _check_best(spec: JobSpec) -> list[FieldProblem]:
    best = spec.checkpoint.keep_best
    if not best or spec.eval.interval_steps is not None:
        return []
    return [only_with("checkpoint.keep_best", best, "eval.interval_steps", "none")]


def _check_heartbeats(spec: JobSpec) -> list[FieldProblem]:
    """Limits must grow."""
    recovery = spec.recovery
    limits = ("heartbeat_period_s", "heartbeat_late_s", "heartbeat_lost_s", "heartbeat_silent_s")
    return [
        FieldProblem(
            field=f"recovery.{later}",
            message=f"is {getattr(recovery, later)}; it must be longer than "
            f"recovery.{sooner} = {getattr(recovery, sooner)}",
        )
        for sooner, later in pairwise(limits)
        if getattr(recovery, later) <= getattr(recovery, sooner)
    ]


def _check_patience(spec: JobSpec) -> list[FieldProblem]:
    """A limit that healthy ranks cannot keep makes suspects of healthy nodes."""
    return [
        FieldProblem(
            field=f"recovery.{field}",
            message=f"is {value:g}; allowed: {least_s:g} s or more, because {why}",
        )
        for field, (least_s, why) in _LEAST_S.items()
        if (value := getattr(spec.recovery, field)) < least_s
    ]


def _check_ladder(spec: JobSpec) -> list[FieldProblem]:
    """Rungs stand in their order."""
    ladder, problems = spec.recovery.ladder, []
    rungs = ("restart", "diagnose", "replace", "pause")
    if list(ladder) != [rung for rung in rungs if rung in ladder]:
        problems.append(
            FieldProblem(
                field="recovery.ladder",
                message=f"is {shown(ladder)}; allowed: some of {shown(rungs)}, each once "
                "and in this order",
            )
        )
    return problems


def _check_detectors(spec: JobSpec) -> list[FieldProblem]:
    """A rollback needs a checkpoint that is old enough."""
    wanted, kept = spec.detectors.rollback_steps, spec.checkpoint
    most = (kept.keep - 1) * kept.storage_interval_steps
    rolls_back = spec.detectors.non_finite_again == "rollback" or spec.detectors.spike == "act"
    if not rolls_back or wanted <= most:
        return []
    return [
        FieldProblem(
            field="detectors.rollback_steps",
            message=f"is {wanted}; allowed with checkpoint.keep = {kept.keep} and "
            f"checkpoint.storage_interval_steps = {kept.storage_interval_steps}: 1 to {most}, so "
            "that a checkpoint as old as that is kept",
        )
    ]


NAME = (_check_name,)
RULES = (_check_best, _check_heartbeats, _check_patience, _check_ladder, _check_detectors)
