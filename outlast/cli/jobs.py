"""`outlast jobs`, `status`, `cancel`, `pause` and `resume`; registers all commands about jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import describe, describe_incident, output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.curve import curve
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.logs import logs
from outlast.cli.options import AnyJobName, Controller, JobName, Json, StateDir
from outlast.cli.profile import profile
from outlast.cli.stacks import stacks
from outlast.cli.submit import submit
from outlast.cli.trace import trace
from outlast.cli.track import track
from outlast.cli.trends import trends
from outlast.cli.watch import watch
from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.v1.jobs_pb2 import Job

_HEADER = ("JOB", "STATE", "SINCE", "STEP", "TRAIN LOSS", "REASON")


def register(app: typer.Typer) -> None:
    """Add the commands about jobs, in the order in which `--help` lists them."""
    app.command()(submit)
    app.command("jobs")(list_jobs)
    shown = (status, watch, logs, curve, trends, track, trace, stacks, profile)
    for command in (*shown, cancel, pause, resume):
        app.command()(command)


def list_jobs(
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """List every job."""
    with controller_of(controller, state_dir) as client:
        found = list(client.list())
    if json:
        output.print_json({"jobs": [output.facts(job) for job in found]})
        return
    now_s = time.time()
    output.print_table(_HEADER, [_row(job, now_s) for job in found], empty="no jobs")


def status(
    job: AnyJobName = "",
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Say why a job is or is not training."""
    with controller_of(controller, state_dir) as client:
        found = find_job(client, job)
        incident = client.incident(found.open_incident) if found.open_incident else None
    now_s = time.time()
    lines = describe.job_lines(found, now_s)
    if incident is not None:
        lines += describe_incident.incident_lines(incident, now_s, said=found.reason)
    if found.error:
        lines.append(("error", found.error.rstrip()))
    if json:
        facts = {
            "job": output.facts(found),
            "training": describe.is_training(found),
            "explanation": describe.headline(found),
            "eta_s": describe.eta_s(found),
            "incident": None if incident is None else output.facts(incident),
        }
        output.print_json(facts)
        return
    output.print_wrapped(describe.headline(found))
    output.print_lines(lines)


def cancel(
    job: JobName,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Stop a job for good."""
    with controller_of(controller, state_dir) as client:
        _print_job(client.cancel(find_job(client, job).job_id), json)


def pause(
    job: JobName,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Stop a job so that `resume` can go on with it.

    Its workers finish their step first, and its nodes are free meanwhile.
    """
    with controller_of(controller, state_dir) as client:
        _print_job(client.pause(find_job(client, job).job_id), json)


def resume(
    job: JobName,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            help="Begin anew, as when the job was submitted. Its checkpoints are set aside.",
        ),
    ] = False,
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="STEP|URL",
            help="Go on from its own committed checkpoint of STEP, setting newer ones aside; or "
            "from the newest in another folder of checkpoints.",
        ),
    ] = "",
    step: Annotated[
        int | None,
        typer.Option("--step", min=1, metavar="N", help="With --checkpoint URL: of this step."),
    ] = None,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Continue a paused job from its newest state, or from where you choose.

    What was trained beyond a chosen point is given up: checkpoints in storage are set aside
    (folder quarantine), not deleted, and never loaded again.
    """
    own_step, url = _choice(checkpoint, step, from_scratch=from_scratch)
    with controller_of(controller, state_dir) as client:
        found = find_job(client, job)
        if found.state in describe.FINISHED:
            raise CliError(describe.how_to_continue(found))
        resumed = client.resume(
            found.job_id, from_scratch=from_scratch, checkpoint_step=own_step, checkpoint_url=url
        )
        _print_job(resumed, json)


def _choice(checkpoint: str, step: int | None, *, from_scratch: bool) -> tuple[int | None, str]:
    """Step and URL of what --checkpoint and --step name; a local path becomes absolute."""
    from pathlib import Path

    if from_scratch and checkpoint:
        raise CliError("--from-scratch and --checkpoint exclude each other; give one of them")
    if checkpoint.isdecimal():
        if step is not None:
            raise CliError(f"--step goes with --checkpoint URL; --checkpoint is {checkpoint}")
        return int(checkpoint), ""
    if step is not None and not checkpoint:
        raise CliError("--step goes with --checkpoint URL, which is not given")
    if not checkpoint or "://" in checkpoint:
        return step, checkpoint
    return step, str(Path(checkpoint).expanduser().resolve())


def _row(job: Job, now_s: float) -> tuple[str, ...]:
    return (
        job.job_id,
        job.state,
        duration(now_s - job.state_since_s),
        _step(job),
        f"{job.loss:.4f}" if job.HasField("loss") else "-",
        job.reason,
    )


def _step(job: Job) -> str:
    if describe.is_script(job):
        return f"{job.step:,}" if job.step > 0 else "-"
    return f"{max(job.step, 0):,}/{job.total_steps:,}"


def _print_job(job: Job, json: bool) -> None:
    if json:
        output.print_json({"job": output.facts(job)})
    else:
        output.print_wrapped(f"{job.job_id} is {job.state}: {job.reason}")
