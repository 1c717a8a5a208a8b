"""`outlast watch`: one job live until it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from outlast.cli import describe, describe_incident, output
from outlast.cli.connect import connector, controller_of, find_job
from outlast.cli.errors import ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import AnyJobName, Controller, Json, StateDir

if TYPE_CHECKING:
    from pathlib import Path

    from outlast.cli.follow import Snapshot
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job


def watch(
    job: AnyJobName = "",
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Watch a job live until it ends.

    Exits 1 if it failed or was cancelled. A job that is paused has not ended: it may wait for a
    person, and is followed on. Ctrl-C leaves it running.
    """
    with controller_of(controller, state_dir) as client:
        found = find_job(client, job)
    follow_to_end(found, controller, state_dir, json=json)


def follow_to_end(job: Job, controller: str, state_dir: Path, *, json: bool) -> None:
    """Show a job until it ends; Ctrl-C leaves it running.

    Raises:
        typer.Exit: it failed or was cancelled.
    """
    from outlast.cli.follow import Follower
    from outlast.cli.view import FRAME_S, show

    follower = Follower(connector(controller, state_dir), job)
    follower.start()
    try:
        if json:
            last = follower.snapshot()
            output.print_json_line({"job": output.facts(job), "steps": []})
            while not last.is_finished:
                follower.wait(FRAME_S)
                last = _print_changes(last, follower.snapshot())
        else:
            last = show(follower)
    finally:
        follower.stop()
    if not json:
        with controller_of(controller, state_dir) as client:
            _print_end(last.job, list(client.incidents(job.job_id)))
    if last.job.state != "SUCCEEDED":
        raise typer.Exit(ExitCode.JOB_FAILED)


def _print_changes(before: Snapshot, now: Snapshot) -> Snapshot:
    steps = now.steps[len(before.steps) :]
    if steps or now.job != before.job:
        facts = {"job": output.facts(now.job), "steps": [output.facts(step) for step in steps]}
        output.print_json_line(facts)
    return now


def _print_end(job: Job, incidents: list[Incident]) -> None:
    print()
    output.print_wrapped(f"{job.job_id} {job.state}: {job.reason}")
    output.print_wrapped(f"{describe.progress(job)}; {describe_incident.count(incidents)}")
    output.print_wrapped(f"checkpoint: {describe.checkpoint(job)}")
    if job.error:
        print(job.error.rstrip())
