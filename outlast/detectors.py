"""The part of a job's spec that says what its detectors do when they find something."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from outlast.section import Section

Mode = Literal["off", "log", "act"]
NonFiniteAgain = Literal["skip", "rollback", "fail"]


class DetectorsSpec(Section):
    """What is done when something is found. off: nobody looks. log: a note among the incidents
    says so, one for each node and cause with a count, and training continues. act: the ladder of
    recovery deals with it."""

    @model_validator(mode="before")
    @classmethod
    def _bare_off(cls, given: Any) -> Any:
        """YAML 1.1 reads a bare `off` as false."""
        if not isinstance(given, dict):
            return given
        return {name: "off" if mode is False else mode for name, mode in given.items()}

    hang: Mode = Field(
        "act",
        description="All ranks stand still for longer than each one's phase has taught, or a "
        "process was stopped by a signal. "
        "recovery.hang_timeout_s holds besides, in any mode.",
    )
    non_finite: Mode = Field(
        "act",
        description="The loss or the gradient is not a number. act: the step is done again from "
        "host memory, each replica's part by another one as well: a node whose bits differ is "
        "replaced. If it comes back, non_finite_again says what is done, and if it does not, "
        "the node that computed it is suspected. log: the step's update is left out, and the "
        "curve shows it. off: the step is taken as it is.",
    )
    non_finite_again: NonFiniteAgain = Field(
        "skip",
        description="A step that was done again is not a number again, so it is the data or the "
        "settings. skip: its batch is left out, and training goes on from the step before; a third "
        "one in a row fails the job. rollback: the batches of the last rollback_steps steps are "
        "left out, this one included, and training goes on from the weights before them. fail: "
        "the nodes are checked, and the third time the job fails. What was left out is marked on "
        "the curve.",
    )
    rollback_steps: int = Field(
        100,
        ge=1,
        # A black box holds 1,024 steps, and these are passed in no time.
        le=500,
        description="non_finite_again rollback and spike act: so many steps are undone. "
        "Checkpoints as old as that must be kept: at most (checkpoint.keep - 1) x "
        "checkpoint.storage_interval_steps.",
    )
    spike: Mode = Field(
        "log",
        description="Loss or gradient norm far above that of the steps before. act: when it is the "
        "loss, the last rollback_steps steps are undone and their batches left out; another one "
        "within as many steps is only logged, as is a norm.",
    )
    straggler: Mode = Field(
        "log",
        description="A rank whose own work takes over 1.1 times that of its equals, again and "
        "again. act: it is stopped gracefully, and its node is checked.",
    )
    data_stall: Mode = Field(
        "log", description="Steps that mostly wait for data. act: as for straggler."
    )
    slowdown: Mode = Field(
        "log",
        description="Tokens per second, and so MFU, far below the best that the job has shown with "
        "as many ranks. act: it is stopped gracefully, and all of its nodes are checked.",
    )
    trends: Literal["off", "log"] = Field(
        "log",
        description="What weeks of steps show: MFU that declines by over 5 % a week, steps that "
        "are slower at a regular period that no setting has and cost over 2 % of the time, "
        "replicas that enter their common operations further and further apart. `outlast trends` "
        "shows all of it in any mode.",
    )
    host_memory: Mode = Field(
        "log",
        description="A node's memory is nearly used up, or its kernel killed a process. act: as "
        "for straggler; the workers begin anew with what they need.",
    )
    disk: Mode = Field(
        "log", description="A disk that the node needs is nearly full. act: as for straggler."
    )
    node_condition: Mode = Field(
        "log",
        description="A monitor in the Kubernetes cluster says that the node's host is broken, by "
        "one of the conditions that close it. Nothing new starts there in any mode. act: as for "
        "straggler.",
    )
    kernel_log: Mode = Field(
        "log",
        description="The node's kernel speaks of a fault of a GPU, memory, a link or a disk. "
        "act: as for straggler.",
    )
    traffic: Mode = Field(
        "log",
        description="A link of a node carries much less than it did, has left its rhythm or is "
        "gone, while others that kept time with it go on. act: as for straggler.",
    )
    worker_log: Mode = Field(
        "log",
        description="A worker writes of a fault of a GPU, link, file system, store or collective "
        "operation. act: as for straggler, where the line speaks against the node.",
    )
