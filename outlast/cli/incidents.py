"""`outlast incidents`: what went wrong, what was done about it, and what it cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import completion, describe, describe_incident, output
from outlast.cli.connect import controller_of, find_incident, find_job
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import Controller, Json, StateDir
from outlast.cli.usage import Commands, ListingGroup

if TYPE_CHECKING:
    from outlast.v1.incidents_pb2 import Incident

_HEADER = ("INCIDENT", "OPENED", "STATE", "CAUSE", "WHAT WAS DONE")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = Commands(
        cls=ListingGroup,
        no_args_is_help=False,
        help="What went wrong, what was done, and what it cost. "
        "`outlast incidents [JOB]` is `outlast incidents list [JOB]`.",
    )
    group.command("list")(list_incidents)
    group.command("show")(show_incident)
    app.add_typer(group, name="incidents")


def list_incidents(
    job: Annotated[
        str,
        typer.Argument(metavar="JOB", help="Only this job's.", autocompletion=completion.jobs),
    ] = "",
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """List incidents, oldest first."""
    with controller_of(controller, state_dir) as client:
        job_id = find_job(client, job).job_id if job else ""
        found = list(client.incidents(job_id))
    if json:
        output.print_json({"incidents": [output.facts(item) for item in found]})
        return
    now_s = time.time()
    output.print_table(_HEADER, [_row(item, now_s) for item in found], empty="no incidents")


def show_incident(
    incident: Annotated[
        str,
        typer.Argument(
            metavar="INCIDENT",
            autocompletion=completion.incidents,
            help="Incident id, or as much of it as tells it from the others: i2, gpt-tiny.i2.",
        ),
    ],
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Tell an incident's whole story: evidence, verdict, timeline, cost."""
    with controller_of(controller, state_dir) as client:
        found = find_incident(client, incident)
    if json:
        output.print_json({"incident": output.facts(found)})
    else:
        output.print_lines(describe_incident.incident_lines(found, time.time()))


def _row(incident: Incident, now_s: float) -> tuple[str, ...]:
    return (
        incident.incident_id,
        describe.short_clock(incident.opened_s, now_s),
        incident.state,
        incident.cause.replace("_", " "),
        describe_incident.summary(incident, now_s),
    )
