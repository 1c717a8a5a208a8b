"""`outlast ckpt push`: from the host memory of a paused job's nodes to storage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import describe, output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import Controller, JobName, Json, StateDir

if TYPE_CHECKING:
    from outlast.client import Client
    from outlast.v1.jobs_pb2 import Job

_LOOK_PERIOD_S = 0.3
# What the agents and the controller add to the time that nodes try.
_MARGIN_S = 30.0
# How the reasons of `controller.core.last_checkpoint` begin.
_UNDER_WAY, _DONE = "uploading", "what its nodes held"


def push(
    job: JobName,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="URL",
            help="Another checkpoint root than the job's own; the job id is added to it.",
        ),
    ] = "",
    timeout_s: Annotated[
        float,
        typer.Option("--timeout-s", min=1.0, metavar="S", help="How long the nodes try."),
    ] = 600.0,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Upload what a paused job holds in host memory.

    For a job that is paused because its last checkpoint could not be stored: once that is
    committed the job has SUCCEEDED. Any other paused job can be resumed from it.
    """
    with controller_of(controller, state_dir) as client:
        job_id = find_job(client, job).job_id
        before = client.push_checkpoint(job_id, url=to, timeout_s=timeout_s)
        if not json:
            output.print_wrapped(f"{job_id}: {before.reason}")
        found = _ended(client, before, timeout_s + _MARGIN_S)
    if json:
        output.print_json({"job": output.facts(found)})
    else:
        output.print_wrapped(f"{job_id} is {found.state}: {found.reason}")
        print(f"checkpoint: {describe.checkpoint(found)}")
    if found.state == "PAUSED" and not found.reason.startswith(_DONE):
        raise typer.Exit(ExitCode.JOB_FAILED)


def _ended(client: Client, job: Job, within_s: float) -> Job:
    """The job once its nodes have answered, or as it is after so long."""
    end_s = time.monotonic() + within_s
    while job.reason.startswith(_UNDER_WAY) and time.monotonic() < end_s:
        time.sleep(_LOOK_PERIOD_S)
        job, _ = client.get(job.job_id)
    return job
