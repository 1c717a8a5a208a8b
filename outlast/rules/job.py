"""Rules of the job's name, of its checkpoints, of recovery and of detectors."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from outlast.ids import NAME_PATTERN
from outlast.problems import FieldProblem, only_with

if TYPE_CHECKING:
    from outlast.spec import JobSpec


def check_name(spec: JobSpec) -> list[FieldProblem]:
    """A name must fit into the names of everything that is made for the job."""
    if NAME_PATTERN.fullmatch(spec.name):
        return []
    return [
        FieldProblem(
            field="name",
            message=f"is {spec.name!r}; allowed: 1 to 53 lower-case letters, digits and '-', "
            "starting and ending with a letter or digit",
        )
    ]


def check_checkpoint(spec: JobSpec) -> list[FieldProblem]:
    """Checkpoints are rated by evaluations, copies lie on another node."""
    problems = []
    best, replicas = spec.checkpoint.keep_best, spec.checkpoint.replicas
    if best and spec.eval.interval_steps is None:
        problems.append(only_with("checkpoint.keep_best", best, "eval.interval_steps", "none"))
    # A world that does not fill its nodes is a problem of its own.
    if replicas and spec.num_nodes == 1:
        problems.append(only_with("checkpoint.replicas", replicas, "2 or more nodes", "1"))
    return problems


def check_recovery(spec: JobSpec) -> list[FieldProblem]:
    """Limits must grow, rungs stand in their order."""
    recovery = spec.recovery
    limits = ("heartbeat_period_s", "heartbeat_late_s", "heartbeat_lost_s", "heartbeat_silent_s")
    problems = [
        FieldProblem(
            field=f"recovery.{later}",
            message=f"is {getattr(recovery, later)}; it must be longer than "
            f"recovery.{sooner} = {getattr(recovery, sooner)}",
        )
        for sooner, later in pairwise(limits)
        if getattr(recovery, later) <= getattr(recovery, sooner)
    ]
    rungs = ("restart", "diagnose", "replace", "pause")
    if list(recovery.ladder) != [rung for rung in rungs if rung in recovery.ladder]:
        problems.append(
            FieldProblem(
                field="recovery.ladder",
                message=f"is {list(recovery.ladder)}; allowed: some of {list(rungs)}, each once "
                "and in this order",
            )
        )
    return problems


def check_detectors(spec: JobSpec) -> list[FieldProblem]:
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
