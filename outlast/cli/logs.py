"""`outlast logs`: what the workers of a job wrote."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.moments import moment_s
from outlast.cli.options import AnyJobName, Controller, Json, StateDir

if TYPE_CHECKING:
    from outlast.cli.loglines import Line
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
    str,
    typer.Option(
        "--attempt",
        metavar="N",
        help="Logs of this attempt, or of all that are kept; 0: the newest.",
    ),
]
Since = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="WHEN",
        help="Only what was written since then: 90s, 10m, 2h or 1d ago, or a time such as "
        "2026-03-31T18:30.",
    ),
]
Grep = Annotated[
    str,
    typer.Option(
        "--grep",
        metavar="PATTERN",
        help="Only lines that match this regular expression ((?i) ignores case); each node "
        "searches its own logs.",
    ),
]
Timestamps = Annotated[
    bool,
    typer.Option(
        "--timestamps", "-t", help="Print when each line was written, to within a few seconds."
    ),
]


def logs(
    ctx: typer.Context,
    job: AnyJobName = "",
    rank: Rank = -1,
    follow: Follow = False,
    tail_bytes: TailBytes = 0,
    attempt: Attempt = "0",
    since: Since = "",
    grep: Grep = "",
    timestamps: Timestamps = False,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Print what a job's workers wrote, line by line with ranks.

    With --since or --grep it searches whole logs, of which --tail-bytes is the end; of one log at
    most 16 MiB are printed. --json prints one object for each line.

    Exits 1 if logs are missing because a node does not answer; the rest is
    printed, and which nodes and ranks those are.
    """
    with _refused(ctx):
        which, since_s = _attempt(attempt), _since_s(since)
        if grep:
            _check_pattern(grep)
    with controller_of(controller, state_dir) as client:
        found = find_job(client, job)
        chunks = client.logs(
            found.job_id,
            rank=None if rank < 0 else rank,
            follow=follow,
            tail_bytes=tail_bytes,
            attempt=which,
            timestamps=timestamps or json,
            since_s=since_s,
            grep=grep,
        )
        show = _printer(found.job_id, json=json, follow=follow, is_full=which < 0)
        num_chunks, missing = _print_logs(chunks, show, follow=follow, json=json)
    if not num_chunks and not json:
        output.print_message(_nothing(rank, which, is_selected=bool(since or grep)))
    for message in missing:
        output.print_message(message)
    if missing:
        raise typer.Exit(ExitCode.JOB_FAILED)


def _nothing(rank: int, attempt: int, *, is_selected: bool) -> str:
    who = "any rank" if rank < 0 else f"rank {rank}"
    there = "" if attempt <= 0 else f" in attempt {attempt} that is still there"
    what = "nothing that is asked for" if is_selected else "nothing"
    return f"{what} was written by {who}{there}"


@contextmanager
def _refused(ctx: typer.Context) -> Iterator[None]:
    """A ValueError within is a wrong option, which it names."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), ctx=ctx) from error


def _attempt(text: str) -> int:
    """-1 for all."""
    if text == "all":
        return -1
    if text.isdecimal():
        return int(text)
    given = text if re.fullmatch(r"-?[\d.]+", text) else repr(text)
    raise ValueError(f"--attempt is {given}; allowed: a whole number, 0 or more, or all")


def _since_s(text: str) -> float:
    return moment_s(text, time.time(), "--since") if text else 0.0


def _check_pattern(text: str) -> None:
    from outlast.patterns import LinePattern

    LinePattern(text, "--grep")


def _printer(
    job_id: str, *, json: bool, follow: bool, is_full: bool
) -> Callable[[Iterable[Line]], None]:
    def show(lines: Iterable[Line]) -> None:
        for line in lines:
            if json:
                output.print_json_line(line.facts(job_id))
            else:
                print(line.labelled(is_full=is_full), flush=follow)

    return show


def _print_logs(
    chunks: Iterable[LogsResponse],
    show: Callable[[Iterable[Line]], None],
    *,
    follow: bool,
    json: bool,
) -> tuple[int, tuple[str, ...]]:
    """Print logs as they come; how many pieces came, and what is missing of them."""
    from outlast.cli.loglines import Lines, Missing

    lines, missing = Lines(), Missing()
    num_chunks = 0
    for chunk in chunks:
        num_chunks += 1
        if not chunk.HasField("missing"):
            show(
                lines.take(
                    chunk.rank, chunk.data, chunk.at_s, attempt=chunk.attempt, node=chunk.node
                )
            )
            continue
        note = missing.take(chunk)
        if json:
            output.print_json_line(output.facts(chunk))
        elif follow:
            output.print_message(note)
    show(lines.rest())
    return num_chunks, missing.messages
