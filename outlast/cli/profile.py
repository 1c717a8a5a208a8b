"""`outlast profile`: where ranks of a job spend their time."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast import speedscope
from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR, check_writable
from outlast.cli.options import AnyJobName, Controller, StateDir

if TYPE_CHECKING:
    from outlast.client import Client
    from outlast.v1.ranks_pb2 import RecordProfileResponse

# Beside each other in a table of 80 columns; each is recorded by a process on its node.
_MOST_RANKS = 8
_MOST_ROWS = 15


def profile(
    job: AnyJobName = "",
    rank: Annotated[
        list[int] | None,
        typer.Option(
            "--rank", min=0, metavar="RANK", help="May be repeated, up to 8.  [default: 0]"
        ),
    ] = None,
    seconds: Annotated[
        int, typer.Option("--seconds", min=1, max=60, metavar="S", help="How long.")
    ] = 10,
    rate: Annotated[
        int, typer.Option("--rate", min=1, max=250, metavar="N", help="Samples a second.")
    ] = 100,
    native: Annotated[
        bool,
        typer.Option("--native", help="Native frames, too; ranks stand still at each sample."),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write it for speedscope.app; .gz compresses."
        ),
    ] = None,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Record where ranks are for some seconds, all at once and while they go on.

    Prints in which functions their main threads are, side by side: of a straggler and a healthy
    peer what differs. Waiting counts as time.
    """
    ranks = list(dict.fromkeys(rank or [0]))
    if len(ranks) > _MOST_RANKS:
        raise CliError(f"--rank is given {len(ranks)} times; allowed: up to {_MOST_RANKS}")
    if to is not None:
        check_writable(to)
    with controller_of(controller, state_dir) as client:
        record = partial(
            client.profile,
            find_job(client, job).job_id,
            seconds=seconds,
            rate=rate,
            native=native,
        )
        output.print_message(f"recording {seconds} s ...")
        recorded = _recorded(client, record, ranks)
    _print(recorded)
    if to is not None:
        _write(to, json.dumps(speedscope.merged(recorded)).encode())


def _recorded(
    client: Client, record: Callable[[int], RecordProfileResponse], ranks: Sequence[int]
) -> dict[str, speedscope.Document]:
    """The profiles of ranks by name, all recorded at once; of those that have none, why."""
    from concurrent.futures import ThreadPoolExecutor

    from outlast.client import RefusedError

    def attempt(rank: int) -> RecordProfileResponse | RefusedError:
        try:
            return record(rank)
        except RefusedError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        try:
            found = dict(zip(ranks, pool.map(attempt, ranks), strict=True))
        except BaseException:
            # Ends the calls, and with them what is being recorded on the nodes.
            client.close()
            raise
    recorded, missing = {}, []
    for rank, each in found.items():
        if isinstance(each, RefusedError):
            missing.append(str(each))
        else:
            recorded[f"rank {rank}"] = json.loads(gzip.decompress(each.speedscope))
    if not recorded:
        raise CliError("; ".join(missing), ExitCode.JOB_FAILED)
    for why in missing:
        output.print_message(f"outlast: missing: {why}")
    return recorded


def _print(recorded: Mapping[str, speedscope.Document]) -> None:
    shares = {name: speedscope.own_shares(document) for name, document in recorded.items()}
    most = {
        place: max(each.get(place, 0.0) for each in shares.values())
        for place in dict.fromkeys(place for each in shares.values() for place in each)
    }
    # Those of the largest share in any rank.
    places = sorted(most, key=lambda place: -most[place])[:_MOST_ROWS]
    rows = [_row(place, [each.get(place, 0.0) for each in shares.values()]) for place in places]
    output.print_table((*(name.upper() for name in shares), "FUNCTION"), rows, empty="")


def _row(place: speedscope.Place, shares: Sequence[float]) -> tuple[str, ...]:
    cells = [f"{100 * share:.1f} %" if share else "-" for share in shares]
    return (*cells, f"{place.name} ({os.path.basename(place.file)})" if place.file else place.name)


def _write(to: Path, text: bytes) -> None:
    try:
        to.write_bytes(gzip.compress(text) if to.suffix == ".gz" else text)
    except OSError as error:
        raise CliError(f"{to} cannot be written: {error.strerror}") from error
    output.print_message(f"wrote {to}: open it at speedscope.app")
