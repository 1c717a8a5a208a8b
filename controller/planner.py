"""Who says what a job will need: the seam between the controller and the trainer's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outlast.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OnMachine:
    """The machine that a step is projected on; what is not said is the planner's usual."""

    device: str = ""
    """Empty: none, and no step is projected."""
    link: str = ""
    """What a rank sends over the network in a second."""
    latency_us: float | None = None
    """Of a message."""
    kernels: float | None = None
    """The share of the device's peak that matrix products reach."""


# Of a spec, what the job will need, as plain values.
PlanJob = Callable[[JobSpec, OnMachine], dict[str, Any]]
