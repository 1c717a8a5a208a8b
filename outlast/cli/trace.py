"""`outlast trace`: what every rank did in its last steps, for Perfetto."""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR, check_writable
from outlast.cli.moments import moment_s
from outlast.cli.options import AnyJobName, Controller, StateDir

if TYPE_CHECKING:
    from outlast.client import Client
    from outlast.layout import Layout
    from outlast.trace.clocks import KnownClock
    from outlast.trace.ranks import TracedRank
    from outlast.trace.stored import StoredRanks
    from outlast.trace.tracks import Mark, Overview
    from outlast.v1.jobs_pb2 import JobCheckpoint
    from outlast.v1.ranks_pb2 import ReadTimesResponse

# As many as the controller gives of a job's history at once.
_MOST_CHECKPOINTS = 10_000
_RUN = re.compile(r"(\d+)(?:-(\d+))?")

OneRank = Annotated[
    list[int] | None,
    typer.Option("--rank", min=0, metavar="RANK", help="Only this rank; may be repeated."),
]
SomeRanks = Annotated[
    str, typer.Option("--ranks", metavar="A-B,…", help="Only these ranks, such as 0-7,16.")
]
Since = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="WHEN",
        help="Only what had not ended by then: 30s or 5m ago, or a time such as 2026-03-31T18:30.",
    ),
]


def trace(
    job: AnyJobName = "",
    to: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to; .gz compresses.")
    ] = Path("trace.json.gz"),
    rank: OneRank = None,
    ranks: SomeRanks = "",
    steps: Annotated[
        str, typer.Option("--steps", metavar="A-B", help="Only these steps; else all known ones.")
    ] = "",
    since: Since = "",
    attempt: Annotated[
        int, typer.Option("--attempt", min=0, metavar="N", help="Of this attempt; 0: the newest.")
    ] = 0,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Write what each rank did in its last steps, and whom it waited for.

    Each rank keeps its last 4,096 operations, and as many passes and phases, unless its job asks
    for more. Open the file at ui.perfetto.dev or in chrome://tracing; FILE.pftrace is Perfetto's
    own format, for many ranks. Works for ranks that have ended, too.
    """
    wanted = _steps(steps)
    only = _ranks(ranks, rank or ())
    since_s = _since_s(since)
    check_writable(to)
    with ExitStack() as stack:
        with controller_of(controller, state_dir) as client:
            found = find_job(client, job)
            layout = _layout_of(client, found.job_id)
            # An earlier attempt may have had more ranks than the newest.
            if attempt in (0, found.attempt):
                _check_ranks(ranks, rank or (), layout.world_size)
            noted = stack.enter_context(_stored(layout))
            ask = partial(client.times, found.job_id, attempt=attempt, steps=wanted or (0, 0))
            missing = _read(partial(ask, since_s=since_s), only, noted)
            marks = _marks(client, found.job_id)
            clocks = _clocks(client)
        for each in missing:
            output.print_message(f"outlast: missing: {each}")
        if not noted:
            raise CliError(f"no rank of {found.job_id} has noted anything that is still there")
        write_trace(noted, noted.layout, marks, wanted, to, clocks=clocks)


def _steps(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    match = _RUN.fullmatch(text)
    if match is None:
        raise CliError(f"--steps is {text!r}; allowed: a step, or two with a hyphen, as 100-120")
    first = int(match.group(1))
    last = int(match.group(2) or first)
    if last < first:
        raise CliError(f"--steps is {text!r}; the first step has to come first")
    return first, last


def _since_s(text: str) -> float:
    try:
        return moment_s(text, time.time(), "--since") if text else 0.0
    except ValueError as error:
        raise CliError(str(error)) from error


def _ranks(text: str, others: Sequence[int]) -> list[range]:
    """Ranks that are named, in runs; none for all."""
    found = [range(rank, rank + 1) for rank in others]
    for part in text.split(",") if text else ():
        match = _RUN.fullmatch(part.strip())
        run = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not run or run.stop > 2**31:
            raise CliError(f"--ranks is {text!r}; allowed: ranks and runs of them, as 0-7,16")
        found.append(run)
    return found


def _check_ranks(text: str, others: Sequence[int], num_ranks: int) -> None:
    """Ranks that are named are some of the job's."""
    allowed = f"ranks 0 to {num_ranks - 1}" if num_ranks > 1 else "rank 0"
    if any(run.stop > num_ranks for run in _ranks(text, ())):
        raise CliError(f"--ranks is {text!r}; allowed: {allowed}")
    for rank in others:
        if rank >= num_ranks:
            raise CliError(f"--rank is {rank}; allowed: {allowed}")


def _read(
    ask: Callable[..., Iterator[ReadTimesResponse]], only: Sequence[range], into: StoredRanks
) -> list[str]:
    """What is missing, in words; all else is put away."""
    missing = []
    for asked in only or (None,):
        for found in ask(ranks=asked):
            if not found.HasField("missing"):
                try:
                    into.put(found)
                except OSError as error:
                    raise CliError(
                        f"no room for what ranks have noted: {error.strerror}"
                    ) from error
            elif found.missing.reason:
                missing.append(f"{found.node}: {found.missing.reason}")
    return missing


def _layout_of(client: Client, job_id: str) -> Layout:
    from outlast.layout import Layout

    listed = client.ranks(job_id, most=1)
    return Layout(tp=listed.tp, pp=listed.pp, dp=listed.dp, ep=listed.ep, cp=listed.cp or 1)


def _stored(layout: Layout) -> StoredRanks:
    from outlast.trace.stored import StoredRanks

    return StoredRanks(layout)


def _marks(client: Client, job_id: str) -> list[Mark]:
    from outlast.trace.tracks import Mark

    marks = [
        Mark(
            name=f"incident {each.incident_id}: {each.cause}",
            at_ns=round(each.opened_s * 1e9),
            facts={"action": each.action, "reason": each.reason},
        )
        for each in client.incidents(job_id, brief=True)
    ]
    return [*marks, *committed_marks(_checkpoints(client, job_id))]


def _checkpoints(client: Client, job_id: str) -> list[JobCheckpoint]:
    """All that are kept of a job's history, oldest first."""
    found: list[JobCheckpoint] = []
    after = ""
    while True:
        page = client.history(job_id, most=_MOST_CHECKPOINTS, after=after, only="checkpoints")
        found = [*page.checkpoints, *found]
        if not (after := page.next):
            return found


def committed_marks(checkpoints: Iterable[JobCheckpoint]) -> list[Mark]:
    """Checkpoints of a job's history, at the moment at which the controller heard of each."""
    from outlast.trace.tracks import Mark

    return [
        Mark(
            name=f"checkpoint of step {each.step} committed",
            at_ns=round(each.committed_s * 1e9),
            facts={"attempt": str(each.attempt)} if each.attempt > 0 else {},
            step=each.step,
        )
        for each in checkpoints
        if each.committed_s > 0
    ]


def _clocks(client: Client) -> dict[str, KnownClock]:
    """What heartbeats say of the clocks of nodes."""
    from outlast.trace.clocks import KnownClock

    return {
        node.node_id: KnownClock(
            ahead_ns=round(node.clock_ahead_s * 1e9), error_ns=round(node.clock_error_s * 1e9)
        )
        for node in client.nodes()
        if node.HasField("clock_ahead_s")
    }


def _protobuf(
    ranks: Sequence[TracedRank], marks: Sequence[Mark], overview: Overview
) -> Iterator[bytes]:
    from outlast.trace.pftrace import parts

    return parts(ranks, overview.layout, marks, overview)


def _json(
    ranks: Sequence[TracedRank], marks: Sequence[Mark], overview: Overview
) -> Iterator[bytes]:
    from outlast.trace.events import events

    yield b'{"displayTimeUnit": "ms", "traceEvents": [\n'
    for number, event in enumerate(events(ranks, overview.layout, marks, overview)):
        yield ((",\n" if number else "") + json.dumps(event)).encode()
    yield b"\n]}\n"


def write_trace(
    ranks: StoredRanks,
    layout: Layout,
    marks: Sequence[Mark],
    wanted: tuple[int, int] | None,
    to: Path,
    *,
    clocks: Mapping[str, KnownClock],
) -> None:
    """Write what these ranks have noted, in the format that the file's name says.

    Raises:
        CliError: they have nothing of the wanted steps, or the file cannot be written.
    """
    from outlast.trace.clocks import ahead_ns
    from outlast.trace.tracks import Overview, copy_marks

    ahead = ahead_ns(ranks, layout, clocks)
    ranks.align(ahead)
    if wanted is not None:
        ranks.cut(*wanted)
    overview = Overview(ranks, layout)
    steps = sorted(overview.steps)
    if wanted is not None and not steps:
        raise CliError(f"no rank has anything of steps {wanted[0]}-{wanted[1]} any more")
    # Marks are of the controller's clock, and all else is put on that of the first rank's node.
    first = clocks.get(ranks[0].node)
    by_ns = 0 if first is None or abs(first.ahead_ns) <= first.error_ns else first.ahead_ns
    placed = [replace(mark, at_ns=mark.at_ns + by_ns) for mark in marks]
    seen = [mark for mark in (*placed, *copy_marks(overview)) if overview.shows(mark)]
    opened = gzip.open if to.suffix == ".gz" else open
    is_json = Path(to.stem if to.suffix == ".gz" else to.name).suffix != ".pftrace"
    parts = (_json if is_json else _protobuf)(ranks, seen, overview)
    try:
        with opened(to, "wb") as file:
            for part in parts:
                file.write(part)
    except OSError as error:
        raise CliError(f"{to}: {error.strerror or error}") from error
    most = max(map(abs, ahead.values()), default=0)
    of_steps = f"steps {steps[0]}-{steps[-1]}" if steps else "no whole step"
    output.print_message(
        f"{to}: {len(ranks)} ranks, {of_steps}"
        + (f"; clocks of nodes were up to {most / 1e6:.2f} ms apart" if most else "")
        + "; open it at ui.perfetto.dev"
    )
