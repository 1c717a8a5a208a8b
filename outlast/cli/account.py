"""Where a job's time went: its account and its incidents as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job


def facts(job: Job, incidents: Sequence[Incident]) -> dict[str, Any]:
    """The account as plain values."""
    return {
        "job_id": job.job_id,
        "seconds": dict(job.seconds),
        "wall_s": sum(job.seconds.values()),
        "ettr": job.ettr,
        "ettr_last_hour": job.ettr_last_hour,
        "steps_lost": steps_lost(incidents),
        "chosen_starts": [
            {"attempt": each.attempt + 1, "step": each.step, "url": each.url}
            for each in job.chosen_starts
        ],
        "steps_left_out": [[each.first, each.last] for each in job.skipped],
        "causes": [
            {"cause": cause, "incidents": count, "mttr_s": mttr_s, "lost_s": lost_s}
            for cause, count, mttr_s, lost_s in by_cause(incidents)
        ],
        "incidents": [
            {"incident_id": item.incident_id, "cause": item.cause, "seconds": dict(item.seconds)}
            for item in incidents
        ],
    }


def by_cause(incidents: Sequence[Incident]) -> list[tuple[str, int, float | None, float]]:
    """(cause, incidents, mean time until training went on, seconds lost), costliest first."""
    found = []
    for cause in dict.fromkeys(item.cause for item in incidents):
        members = [item for item in incidents if item.cause == cause]
        times = [item.recovery_s for item in members if item.HasField("recovery_s")]
        mttr_s = sum(times) / len(times) if times else None
        lost_s = sum(sum(item.seconds.values()) for item in members)
        found.append((cause, len(members), mttr_s, lost_s))
    return sorted(found, key=lambda row: -row[-1])


def steps_lost(incidents: Sequence[Incident]) -> int:
    """Steps that were trained and had to be trained again."""
    return sum(item.steps_redone for item in incidents)


def shown_parts(job: Job) -> list[tuple[str, float]]:
    """The parts in the order of `controller.core.accounting`."""
    from controller.core.accounting import PARTS

    return [(str(part), job.seconds.get(str(part), 0.0)) for part in PARTS]


def cause_rows(incidents: Sequence[Incident]) -> list[tuple[str, str, str, str]]:
    """Incidents by cause, in words."""
    return [
        (
            cause.replace("_", " "),
            str(count),
            "-" if mttr_s is None else duration(mttr_s),
            duration(lost_s),
        )
        for cause, count, mttr_s, lost_s in by_cause(incidents)
    ]
