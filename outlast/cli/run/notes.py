"""What is said of faults while a script runs, and of its end: a line or two each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outlast.cli.run.stops import exit_code
from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job

# Of a job that failed without the end of a rank, or by one that says that all was well.
FAILED = 1
# A job that fails says why at its end.
_LAST = ("fail", "pause")


class Notes:
    """Which faults have been reported."""

    def __init__(self) -> None:
        self._reported: dict[str, None] = {}
        self._over: dict[str, None] = {}

    def take(self, incidents: Sequence[Incident]) -> list[str]:
        """What is new, a message each."""
        messages = []
        for incident in incidents:
            if incident.is_note or not incident.action or incident.action in _LAST:
                continue
            name = incident.incident_id
            if name not in self._reported:
                self._reported[name] = None
                messages.append(f"fault: {_in_flags(incident.reason)}")
            if incident.state == "CLOSED" and name not in self._over:
                self._over[name] = None
                messages.append(_resumed(incident))
        return messages


def _resumed(incident: Incident) -> str:
    # The attempt that the fault struck is followed by the next one.
    attempt = incident.attempt + 1
    if not incident.HasField("recovery_s"):
        return f"attempt {attempt} runs"
    return f"attempt {attempt} runs, {duration(incident.recovery_s)} after the fault"


def end_of(job: Job) -> tuple[int, list[str]]:
    """The exit code that a job's end is worth, and what is said of it."""
    match job.state:
        case "SUCCEEDED":
            return 0, []
        case "FAILED":
            code = exit_code(job.exit_code) if job.HasField("exit_code") else FAILED
            return code or FAILED, [*_error_of(job), f"{job.name} failed: {_in_flags(job.reason)}"]
        case "CANCELLED":
            return FAILED, [f"{job.name} was cancelled: {job.reason}"]
        case _:
            return FAILED, [*_error_of(job), f"{job.name} is {job.state}: {job.reason}"]


def _in_flags(reason: str) -> str:
    """A reason with the flag that stands for a field of the spec."""
    return reason.replace("recovery.retry_budget", "--max-restarts")


def _error_of(job: Job) -> list[str]:
    """A traceback; one line is in the reason already, and a single rank has printed its own."""
    error = job.error.rstrip()
    return [error] if "\n" in error and job.ranks != 1 else []
