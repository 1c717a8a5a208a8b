"""`outlast report`: what a job's time went into, fault by fault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import output, words
from outlast.cli.connect import controller_of, find_job
from outlast.cli.options import DEFAULT_STATE_DIR, Controller, JobName, Json, StateDir

if TYPE_CHECKING:
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(report)


def report(
    job: JobName,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures.")
    ] = None,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Account for every second of a job: productive, or what it was lost to, and by which fault.

    ETTR is the productive share of the time since the job was submitted.
    """
    with controller_of(controller, state_dir) as client:
        found = find_job(client, job)
        incidents = client.incidents(found.job_id)
    if html is not None:
        from outlast.cli.pages.job import render

        html.write_text(render(found, incidents), encoding="utf-8")
    if json:
        output.print_json(facts(found, incidents))
    else:
        _print(found, incidents)


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
            "-" if mttr_s is None else words.duration(mttr_s),
            words.duration(lost_s),
        )
        for cause, count, mttr_s, lost_s in by_cause(incidents)
    ]


def _print(job: Job, incidents: Sequence[Incident]) -> None:
    wall_s = sum(job.seconds.values())
    output.print_lines(
        [
            ("job", f"{job.job_id} ({job.state}), {words.duration(wall_s)} since it was submitted"),
            ("ETTR", f"{100 * job.ettr:.2f} %; {100 * job.ettr_last_hour:.2f} % in the last hour"),
            *(
                (
                    "",
                    f"{part:<11} {100 * seconds / (wall_s or 1.0):6.2f} %  "
                    f"{words.duration(seconds)}",
                )
                for part, seconds in shown_parts(job)
            ),
            ("steps lost", str(steps_lost(incidents))),
            *words.chosen(job),
            *words.left_out(job),
        ]
    )
    print()
    header = ("CAUSE", "INCIDENTS", "MTTR", "LOST")
    output.print_table(header, cause_rows(incidents), empty="no incidents")
