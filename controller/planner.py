"""Who says what a job will need: the seam between the controller and the trainer's arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outlast.spec import JobSpec

# Of a spec, what the job will need, as plain values; with a device, a link and the share of the
# device's peak that matrix products reach: "" and None for defaults.
PlanJob = Callable[[JobSpec, str, str, float | None], dict[str, Any]]
