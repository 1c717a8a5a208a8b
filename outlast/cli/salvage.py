"""`outlast ckpt salvage`: what is intact of a damaged checkpoint, and what is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.job_folder import Folder, url_of
from outlast.cli.options import Controller, Json, StateDir

if TYPE_CHECKING:
    from checkpoint.salvage import Damage, Lost, Salvaged

# More of them tell a person nothing that the report does not.
_MAX_SHOWN = 8


def salvage(
    job: Folder,
    to: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER|URL",
            help="New or empty place for what is saved, outside the job's own folder.",
        ),
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, metavar="N", help="Step of the checkpoint; the newest."),
    ] = None,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Save every tensor of a damaged checkpoint that is intact, and report what is lost.

    Whole tensors go into a folder that torch.distributed.checkpoint reads, intact pieces of
    others into a second one, the report into salvage.json. If nothing is lost, the result is a
    checkpoint for `outlast resume --checkpoint`. The exit code is 1 if anything is lost.
    """
    from checkpoint.remains import newest_remains
    from checkpoint.salvage import salvage as salvage_checkpoint
    from checkpoint.storage.storage import Storage
    from outlast.cli.progress import bytes_bar
    from outlast.errors import OutlastError

    url = url_of(job, controller, state_dir)
    try:
        source, target = Storage(url), Storage(to)
        chosen = newest_remains(source) if step is None else step
        with bytes_bar(f"step {chosen}", None, quiet=json) as on_bytes:
            done = salvage_checkpoint(source, target, chosen, on_bytes)
    except (OutlastError, ValueError) as error:
        raise CliError(str(error)) from error
    if json:
        output.print_json(asdict(done))
    else:
        output.print_lines(_lines(done))
        if done.lost:
            print()
            _print_lost(done.lost)
    if not done.is_complete:
        raise typer.Exit(ExitCode.JOB_FAILED)


def _lines(done: Salvaged) -> list[tuple[str, str]]:
    from checkpoint.salvage import REPORT
    from outlast.cli.describe import size

    lines = [("step", f"{done.step} of attempt {done.attempt}, from {done.source}")]
    lines += [("record", problem) for problem in _shown(done.records)]
    lines += [("damage", _damage(each)) for each in done.damage[:_MAX_SHOWN]]
    if len(done.damage) > _MAX_SHOWN:
        lines.append(("damage", f"and {len(done.damage) - _MAX_SHOWN} more"))
    saved = [f"{_tensors(done.num_whole)} whole"]
    saved += [f"{_tensors(done.num_partial)} in part"] if done.num_partial else []
    lines.append(("saved", f"{', '.join(saved)}: {size(done.saved_bytes)}"))
    if done.tensors:
        lines.append(("tensors", f"{done.target}/{done.tensors}"))
    if done.pieces:
        lines.append(("pieces", f"{done.target}/{done.pieces}"))
    if done.unverified:
        ranks = ", ".join(map(str, done.unverified))
        lines.append(
            ("unverified", f"of rank {ranks}: no checksum or record is left to compare with")
        )
    if done.other_attempts:
        lines.append(("not used", f"{', '.join(done.other_attempts)}: other attempts, other bits"))
    lines.append(("lost", _summary(done)))
    lines.append(("report", f"{done.target}/{REPORT}"))
    if done.is_complete:
        lines.append(("next", f"outlast resume JOB --checkpoint {done.target}"))
    return lines


def _summary(done: Salvaged) -> str:
    from outlast.cli.describe import size

    if done.is_complete:
        return "nothing"
    if not done.lost:
        return "no tensor; what a job needs besides (loader, random numbers) is not certain"
    names = len({each.tensor for each in done.lost})
    return f"{size(done.lost_bytes)} of {_tensors(names)}"


def _damage(each: Damage) -> str:
    return f"{each.file} (rank {each.rank}), bytes {each.start} to {each.end}: {each.problem}"


def _print_lost(lost: Sequence[Lost]) -> None:
    rows = [
        (
            f"{each.num_elements}",
            "-" if each.rank is None else f"{each.rank}",
            f"{each.tensor}{each.indices}",
        )
        for each in lost[:_MAX_SHOWN]
    ]
    output.print_table(("ELEMENTS", "RANK", "LOST"), rows, empty="")
    if len(lost) > _MAX_SHOWN:
        print(f"and {len(lost) - _MAX_SHOWN} more, which the report lists")


def _shown(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MAX_SHOWN
    return [*lines[:_MAX_SHOWN], *([f"and {more} more"] if more > 0 else [])]


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'' if count == 1 else 's'}"
