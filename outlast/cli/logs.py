"""`outlast logs`: what the workers of a job wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import AnyJobName, Controller, Json, StateDir

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outlast.v1.jobs_pb2 import LogsResponse

Rank = Annotated[
    int, typer.Option("--rank", min=-1, metavar="RANK", help="Only this rank; -1: every rank.")
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")]
TailBytes = Annotated[
    int,
    typer.Option("--tail-bytes", min=0, metavar="BYTES", help="The end of each log; 0: 64 KiB."),
]
Attempt = Annotated[
    int,
    typer.Option("--attempt", min=0, metavar="N", help="Logs of this attempt; 0: the newest."),
]
Timestamps = Annotated[
    bool,
    typer.Option(
        "--timestamps", "-t", help="Print when each line was written, to within a few seconds."
    ),
]


def logs(
    job: AnyJobName = "",
    rank: Rank = -1,
    follow: Follow = False,
    tail_bytes: TailBytes = 0,
    attempt: Attempt = 0,
    timestamps: Timestamps = False,
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
