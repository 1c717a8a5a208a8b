"""`outlast trace`: what every rank did in its last steps, for Perfetto."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR, check_writable
from outlast.cli.options import AnyJobName, Controller, StateDir

if TYPE_CHECKING:
    from outlast.client import Client
    from outlast.layout import Layout
    from outlast.trace.clocks import KnownClock
    from outlast.trace.ranks import TracedRank
    from outlast.trace.stored import StoredRanks
    from outlast.trace.tracks import Mark, Overview

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


def trace(
    job: AnyJobName = "",
    to: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Where to; .gz compresses.")
    ] = Path("trace.json.gz"),
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", min=0, metavar="RANK", help="Only this rank; may be repeated."),
    ] = None,
    steps: Annotated[
        str, typer.Option("--steps", metavar="A-B", help="Only these steps; else all known ones.")
    ] = "",
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
    check_writable(to)
    with ExitStack() as stack:
        with controller_of(controller, state_dir) as client:
            found = find_job(client, job)
            layout = _layout_of(client, found.job_id)
            ranks = stack.enter_context(_stored(layout))
            missing = _read(client, found.job_id, rank, attempt, wanted, ranks)
            marks = _marks(client, found.job_id)
            clocks = _clocks(client)
        for each in missing:
            output.print_message(f"outlast: missing: {each}")
        if not ranks:
            raise CliError(f"no rank of {found.job_id} has noted anything that is still there")
        write_trace(ranks, layout, marks, wanted, to, clocks=clocks)


def _steps(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    match = _STEPS.fullmatch(text)
    if match is None:
        raise CliError(f"--steps is {text!r}; allowed: a step, or two with a hyphen, as 100-120")
    first = int(match.group(1))
    last = int(match.group(2) or first)
    if last < first:
        raise CliError(f"--steps is {text!r}; the first step has to come first")
    return first, last


def _read(
    client: Client,
    job_id: str,
    only: Sequence[int] | None,
    attempt: int,
    wanted: tuple[int, int] | None,
    into: StoredRanks,
) -> list[str]:
    """What is missing, in words; all else is put away."""
    missing = []
    for asked in only or (None,):
        for found in client.times(job_id, rank=asked, attempt=attempt, steps=wanted or (0, 0)):
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
    return Layout(tp=listed.tp, pp=listed.pp, dp=listed.dp, ep=listed.ep)


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
    job, _ = client.get(job_id)
    if job.HasField("committed_s"):
        name = f"checkpoint of step {job.committed_step} committed"
        marks.append(Mark(name=name, at_ns=round(job.committed_s * 1e9), facts={}))
    return marks


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
    # What happened before the first thing that is shown is not in the picture.
    begun_ns = overview.first_ns
    # Marks are of the controller's clock, and all else is put on that of the first rank's node.
    first = clocks.get(ranks[0].node)
    by_ns = 0 if first is None or abs(first.ahead_ns) <= first.error_ns else first.ahead_ns
    placed = [replace(mark, at_ns=mark.at_ns + by_ns) for mark in marks]
    seen = [mark for mark in (*placed, *copy_marks(overview)) if mark.at_ns >= begun_ns]
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
