"""`outlast stacks`: where each rank of a job stands now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import AnyJobName, Controller, Json, StateDir

if TYPE_CHECKING:
    from outlast.v1.ranks_pb2 import ReadStacksResponse


def stacks(
    job: AnyJobName = "",
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", min=0, metavar="RANK", help="Only this rank; may be repeated."),
    ] = None,
    brief: Annotated[
        bool, typer.Option("--brief", help="One line for each rank: its innermost frame.")
    ] = False,
    native: Annotated[
        bool, typer.Option("--native", help="Native frames, too; ranks stand still meanwhile.")
    ] = False,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Print where each rank that runs stands now: the stacks of its threads.

    py-spy reads them on the nodes, while the ranks go on.
    """
    with controller_of(controller, state_dir) as client:
        job_id = find_job(client, job).job_id
        found = [
            each
            for asked in rank or (None,)
            for each in client.stacks(job_id, rank=asked, native=native)
        ]
    missing = [each for each in found if each.HasField("missing")]
    ranks = sorted(
        (each for each in found if not each.HasField("missing")), key=lambda each: each.rank
    )
    for each in missing:
        output.print_message(f"outlast: missing: {each.node}: {each.missing.reason}")
    if not ranks:
        raise CliError(f"no rank of {job_id} runs that could be looked at")
    if json:
        output.print_json({"ranks": [_facts(each) for each in ranks]})
    elif brief:
        rows = [(str(each.rank), each.node, each.location) for each in ranks]
        output.print_table(("RANK", "NODE", "WHERE"), rows, empty="")
    else:
        _print(ranks)


def _facts(found: ReadStacksResponse) -> dict[str, object]:
    return {
        "rank": found.rank,
        "node": found.node,
        "attempt": found.attempt,
        "location": found.location,
        "stacks": found.text,
    }


def _print(ranks: Sequence[ReadStacksResponse]) -> None:
    for number, each in enumerate(ranks):
        if number:
            print()
        print(f"rank {each.rank} on {each.node}, attempt {each.attempt}: {each.location}")
        for line in each.text.splitlines():
            print(f"  {line}".rstrip())
