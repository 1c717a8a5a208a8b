"""`outlast ckpt convert`: take over a checkpoint that plain torch has saved."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.errors import CliError
from outlast.cli.options import Json

if TYPE_CHECKING:
    from checkpoint.torch_format.convert import Converted

_Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Folder or URL that torch.distributed.checkpoint has saved to.",
    ),
]
_Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="Checkpoint root of a job: its checkpoint.url, then a slash and the job's id.",
    ),
]
_Step = Annotated[
    int,
    typer.Option(
        "--step",
        metavar="STEP",
        min=1,
        help="The step that the state is of: training goes on after it.",
    ),
]
_Renames = Annotated[
    list[str],
    typer.Option(
        "--rename",
        metavar="BEFORE=AFTER",
        help="Names that begin with BEFORE begin with AFTER instead, such as 'net.=model.'; may "
        "be repeated, the first that fits counts.",
    ),
]
# More names than this tell a person nothing that the first ones do not.
_MAX_NAMES = 8


def convert(
    source: _Source,
    target: _Target,
    step: _Step,
    rename: _Renames = [],  # noqa: B006
    json: Json = False,
) -> None:
    """Make a checkpoint of plain torch.distributed.checkpoint one that a job goes on from.

    Takes the tensors model.NAME and the optimizer's exp_avg and exp_avg_sq of each, and
    says what it leaves. Nothing in SOURCE is run: of its pickles, only descriptions and
    tensors are read.
    """
    from checkpoint.storage.storage import Storage
    from checkpoint.torch_format.convert import Rename
    from checkpoint.torch_format.convert import convert as convert_checkpoint
    from outlast.cli.progress import bytes_bar
    from outlast.errors import OutlastError

    try:
        renames = [Rename.parse(text) for text in rename]
        with bytes_bar("converting", None, quiet=json) as on_bytes:
            done = convert_checkpoint(
                Storage(source), Storage(target), step=step, renames=renames, on_bytes=on_bytes
            )
    except (OutlastError, ValueError) as error:
        raise CliError(str(error)) from error
    if json:
        output.print_json(asdict(done))
    else:
        output.print_lines(_lines(done, target))


def _lines(done: Converted, target: str) -> list[tuple[str, str]]:
    from outlast.cli.describe import size

    lines = [
        (
            "converted",
            f"{done.num_tensors} tensors, {size(done.size_bytes)}: step {done.step} of {target}",
        )
    ]
    if done.left_behind:
        shown = ", ".join(done.left_behind[:_MAX_NAMES])
        more = len(done.left_behind) - _MAX_NAMES
        lines.append(("left", f"{shown} and {more} more" if more > 0 else shown))
    return lines
