"""The part of a job's spec that says when something is a fault, and what is done about it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from outlast.section import Section


class ElasticSpec(Section):
    """Training on with fewer data-parallel replicas while nodes are missing, and with all again."""

    min_dp: int | None = Field(
        None,
        ge=1,
        description="Fewest replicas to train with; null: the job waits for its nodes. Global "
        "batch and data order stay. Sizes are the numbers of replicas below parallel.dp that "
        "divide global_batch / micro_batch and fill whole nodes.",
    )
    after_s: float = Field(
        60.0, ge=0, description="Missing nodes are waited for so long; then fewer replicas do."
    )
    grow_after_s: float = Field(
        300.0,
        ge=0,
        description="A smaller attempt trains at least so long before a committed checkpoint may "
        "be the moment to go on with more replicas. A script that has stored none is stopped then.",
    )


class RecoverySpec(Section):
    """When something counts as a fault, and how much is tried before giving up."""

    heartbeat_period_s: float = Field(
        2.0, gt=0, description="An agent reports this often. 0.25 s at least."
    )
    heartbeat_late_s: float = Field(
        6.0,
        gt=0,
        description="Silence after which a node is LATE. Longer than heartbeat_period_s, and "
        "0.75 s at least.",
    )
    heartbeat_lost_s: float = Field(
        15.0,
        gt=0,
        description="Silence that makes a node LOST once a second signal agrees. Longer than "
        "heartbeat_late_s, and 1.5 s at least.",
    )
    heartbeat_silent_s: float = Field(
        60.0,
        gt=0,
        description="Silence that needs no second signal. Longer than heartbeat_lost_s, and 4 s at "
        "least.",
    )
    hang_timeout_s: float = Field(
        300.0,
        gt=0,
        description="No step completed for so long: the job hangs, whatever detectors.hang has "
        "learned. Longer than any step with its evaluation, and 10 s at least; found later by what "
        "heartbeat_period_s is above 2 s. With workload.command 600 s unless given; until the "
        "script has reported a step, the time for which all its ranks may show no sign of life "
        "(output, CPU time). Passed twice in a row though no rank holds the others up, it pauses "
        "the job.",
    )
    first_step_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="From the start of workers to the first step of all ranks. Storage that does "
        "not answer is waited for half as long. 10 s at least.",
    )
    stop_timeout_s: float = Field(
        60.0,
        gt=0,
        description="A node that has not stopped its workers by then is a suspect. 2 s at least.",
    )
    preflight: bool = Field(
        True, description="Check each node before the job first uses it; takes some seconds."
    )
    preflight_timeout_s: float = Field(300.0, gt=0, description="Checks of one node.")
    diagnose_timeout_s: float = Field(600.0, gt=0, description="Checks after a fault.")
    retry_budget: int = Field(
        10, ge=0, description="Faults survived without a newer committed checkpoint in between."
    )
    retry_program_errors: bool = Field(
        False,
        description="Restart after errors of the job's own program, too, which as a rule would "
        "come again, until retry_budget is spent, as torchrun does. Without, they end the job.",
    )
    ladder: tuple[Literal["restart", "diagnose", "replace", "pause"], ...] = Field(
        ("restart", "diagnose", "replace", "pause"),
        min_length=1,
        description="What may be done about a fault, in this order. restart: processes in place, "
        "from host memory. diagnose: the same, once the suspected nodes have passed their checks. "
        "replace: bad nodes by others. pause: stop and wait for a person, when nothing else is "
        "left; without it the job fails. Without restart, nodes are checked after every fault.",
    )
    heal: bool = Field(
        False,
        description="Ranks that live when another dies or hangs, or its node is lost or drained, "
        "and those of an elastic job that shrinks or grows, keep their processes: they leave the "
        "attempt and join the next, with the memory of their model and their pinned slots. For "
        "the trainer's ranks, and for scripts that call session.healing; processes of other "
        "scripts are made anew. Not run on GPUs yet (see the limits), and off until it has run "
        "for longer.",
    )
    in_place_restarts: int = Field(
        1,
        ge=0,
        description="Faults in a row answered by the rung restart before the rung diagnose.",
    )
    elastic: ElasticSpec = ElasticSpec()
    controller_absence_limit_s: float = Field(
        1800.0, gt=0, description="Workers stop after so long without any controller."
    )
