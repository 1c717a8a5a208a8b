"""`outlast report`: what a job's time went into, fault by fault."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import describe, output
from outlast.cli.account import cause_rows, facts, shown_parts, steps_lost
from outlast.cli.connect import controller_of, find_job
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import Controller, JobName, Json, StateDir
from outlast.durations import duration

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


def _print(job: Job, incidents: Sequence[Incident]) -> None:
    wall_s = sum(job.seconds.values())
    output.print_lines(
        [
            (
                "job",
                f"{job.job_id} ({job.state}), {duration(wall_s)} since it was submitted",
            ),
            ("ETTR", f"{100 * job.ettr:.2f} %; {100 * job.ettr_last_hour:.2f} % in the last hour"),
            *(
                (
                    "",
                    f"{part:<11} {100 * seconds / (wall_s or 1.0):6.2f} %  {duration(seconds)}",
                )
                for part, seconds in shown_parts(job)
            ),
            ("steps lost", str(steps_lost(incidents))),
            *describe.chosen(job),
            *describe.left_out(job),
        ]
    )
    print()
    header = ("CAUSE", "INCIDENTS", "MTTR", "LOST")
    output.print_table(header, cause_rows(incidents), empty="no incidents")
