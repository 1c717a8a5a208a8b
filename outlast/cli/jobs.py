"""`outlast submit`, `jobs`, `status`, `watch`, `logs`, `cancel`, `pause` and `resume`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import incident_words, output, words
from outlast.cli.connect import connector, controller_of, find_job, where_nodes_are
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import (
    AnyJobName,
    Assignments,
    Controller,
    JobName,
    Json,
    SpecFile,
    StateDir,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from outlast.cli.follow import Snapshot
    from outlast.client import Client
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job, LogsResponse

_HEADER = ("JOB", "STATE", "SINCE", "STEP", "LOSS", "REASON")


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(submit)
    app.command("jobs")(list_jobs)
    for command in (status, watch, logs, cancel, pause, resume):
        app.command()(command)


def submit(
    spec: SpecFile,
    set_: Assignments = [],  # noqa: B006
    follow: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Follow the job to its end, also while it is paused; exit 1 if it fails.",
        ),
    ] = False,
    request_id: Annotated[
        str,
        typer.Option(
            "--request-id",
            metavar="ID",
            help="Submitting again with the same id and spec gives the job already made.",
        ),
    ] = "",
    wait_for_nodes: Annotated[
        bool,
        typer.Option(
            "--wait-for-nodes",
            help="Queue the job even if no connected node has what it needs.",
        ),
    ] = False,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Submit a training job.

    The spec is checked first, with the files that it names as far as they can be seen from
    here. Relative paths in it are below the current folder.
    """
    from outlast.cli.specfile import load_spec

    checked = load_spec(spec, set_, where_nodes_are(controller, state_dir))
    with controller_of(controller, state_dir) as client:
        job = client.submit(
            checked.document, request_id=request_id or None, wait_for_nodes=wait_for_nodes
        )
        if not json:
            # First: whatever happens from here on, the job is there.
            print(f"submitted {job.job_id}", flush=True)
        missing = _fit_warnings(client, checked.document)
    for line in (*checked.seen.warnings, *missing):
        output.print_message(f"warning: {line}")
    if not json:
        for line in checked.resolved:
            output.print_wrapped(line)
        print(f"checkpoints: {job.checkpoint_url}", flush=True)
    elif not follow:
        output.print_json({"job": output.facts(job)})
    if follow:
        _follow(job, controller, state_dir, json=json)


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
    lines = words.job_lines(found, now_s)
    if incident is not None:
        lines += incident_words.incident_lines(incident, now_s, said=found.reason)
    if found.error:
        lines.append(("error", found.error.rstrip()))
    if json:
        facts = {
            "job": output.facts(found),
            "training": words.is_training(found),
            "explanation": words.headline(found),
            "eta_s": words.eta_s(found),
            "incident": None if incident is None else output.facts(incident),
        }
        output.print_json(facts)
        return
    output.print_wrapped(words.headline(found))
    output.print_lines(lines)


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
    _follow(found, controller, state_dir, json=json)


def logs(
    job: AnyJobName = "",
    rank: Annotated[
        int, typer.Option("--rank", min=-1, metavar="RANK", help="Only this rank; -1: every rank.")
    ] = -1,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines.")
    ] = False,
    tail_bytes: Annotated[
        int,
        typer.Option(
            "--tail-bytes", min=0, metavar="BYTES", help="The end of each log; 0: 64 KiB."
        ),
    ] = 0,
    attempt: Annotated[
        int,
        typer.Option("--attempt", min=0, metavar="N", help="Logs of this attempt; 0: the newest."),
    ] = 0,
    timestamps: Annotated[
        bool,
        typer.Option(
            "--timestamps", "-t", help="Print when each line was written, to within a few seconds."
        ),
    ] = False,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Print what a job's workers wrote, line by line with ranks.

    Exits 1 if logs are missing because a node does not answer; the rest is
    printed, and which nodes and ranks those are.
    """
    with controller_of(controller, state_dir) as client:
        found = find_job(client, job)
        chunks = client.logs(
            found.job_id,
            rank=None if rank < 0 else rank,
            follow=follow,
            tail_bytes=tail_bytes,
            attempt=attempt,
            timestamps=timestamps,
        )
        num_chunks, missing = _print_logs(chunks, follow=follow, json=json)
    if not num_chunks and not json:
        who = "any rank" if rank < 0 else f"rank {rank}"
        there = f" in attempt {attempt} that is still there" if attempt else ""
        output.print_message(f"nothing was written by {who}{there}")
    for message in missing:
        output.print_message(message)
    if missing:
        raise typer.Exit(ExitCode.JOB_FAILED)


def _print_logs(
    chunks: Iterable[LogsResponse], *, follow: bool, json: bool
) -> tuple[int, tuple[str, ...]]:
    """Print logs as they come; how many pieces came, and what is missing of them."""
    from outlast.cli.loglines import Lines, Missing

    lines, missing = Lines(), Missing()
    num_chunks = 0
    for chunk in chunks:
        num_chunks += 1
        is_missing = chunk.HasField("missing")
        note = missing.take(chunk) if is_missing else ""
        if json:
            text = chunk.data.decode(errors="replace")
            output.print_json_line({**output.facts(chunk), "data": text})
        elif not is_missing:
            for line in lines.take(chunk.rank, chunk.data, chunk.at_s):
                print(line, flush=follow)
        elif follow:
            output.print_message(note)
    for line in lines.rest():
        print(line)
    return num_chunks, missing.messages


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
        if found.state in words.FINISHED:
            raise CliError(words.how_to_continue(found))
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


def _fit_warnings(client: Client, document: dict[str, Any]) -> list[str]:
    """What the connected nodes lack; nothing where the controller does not answer that."""
    from outlast.cli.fit import missing_nodes
    from outlast.errors import OutlastError

    try:
        fit = client.check_fit(document)
    except OutlastError:
        return []
    lacking = [f"{each.field} {each.description}; it waits in the queue" for each in fit.problems]
    return lacking or missing_nodes(fit, "waits")


def _follow(job: Job, controller: str, state_dir: Path, *, json: bool) -> None:
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
    output.print_wrapped(f"{words.progress(job)}; {incident_words.count(incidents)}")
    output.print_wrapped(f"checkpoint: {words.checkpoint(job)}")
    if job.error:
        print(job.error.rstrip())


def _row(job: Job, now_s: float) -> tuple[str, ...]:
    return (
        job.job_id,
        job.state,
        words.duration(now_s - job.state_since_s),
        f"{max(job.step, 0):,}/{job.total_steps:,}",
        f"{job.loss:.4f}" if job.HasField("loss") else "-",
        job.reason,
    )


def _print_job(job: Job, json: bool) -> None:
    if json:
        output.print_json({"job": output.facts(job)})
    else:
        output.print_wrapped(f"{job.job_id} is {job.state}: {job.reason}")
