"""`outlast data describe`: the ids of a file of tokens are read once, and their range is noted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.options import Json
from outlast.cli.progress import bytes_bar

if TYPE_CHECKING:
    from outlast.tokens.files import TokenFile
    from outlast.tokens.id_range import IdRange

_Tokens = Annotated[
    str,
    typer.Argument(
        metavar="FILE|URL", help="A pair NAME.bin and NAME.idx of Megatron-LM, or a .npy array."
    ),
]
# Of one call to a store that takes the note.
_DEADLINE_S = 20.0


def describe(tokens: _Tokens, json: Json = False) -> None:
    """Read a file of tokens once, and note the range of its ids.

    The note is FILE.ids.json, beside it. A folder of `outlast data prepare` needs none. Without
    one a job does not start on more than 1 GiB of tokens, or 64 MiB at URLs, all files together,
    unless data.check_ids is sampled.
    """
    from outlast.errors import OutlastError
    from outlast.tokens.id_range import ENDING
    from outlast.tokens.remote_file import is_remote

    name = tokens if is_remote(tokens) else str(Path(tokens).expanduser().resolve())
    try:
        file, ids = _described(name, json)
    except ValueError as error:
        raise CliError(f"{name} {error}") from error
    except (OutlastError, OSError) as error:
        raise CliError(f"{name}: {error}", ExitCode.JOB_FAILED) from error
    note = file.name + ENDING
    facts = {
        "tokens": file.num_tokens,
        "smallest": ids.smallest,
        "largest": ids.largest,
        "largest_at": ids.largest_at,
        "note": note,
    }
    if json:
        output.print_json(facts)
        return
    known = f"{ids.smallest} to {ids.largest}; token {ids.largest_at}, counted from 0, is the first"
    lines = [
        ("tokens", f"{file.num_tokens:,}"),
        ("ids", f"{known} of {ids.largest}"),
        ("noted in", note),
        ("spec", f"model.vocab_size: {ids.largest + 1}, or more"),
    ]
    output.print_lines(lines)


def _described(name: str, quiet: bool) -> tuple[TokenFile, IdRange]:
    """Read a file of tokens and write the note beside it."""
    from checkpoint.storage.storage import Storage
    from outlast.errors import OutlastError
    from outlast.remote.files import PATIENCE_S, files_of_command
    from outlast.spec.data import DataSpec
    from outlast.tokens.files import open_source
    from outlast.tokens.id_range import ENDING
    from outlast.tokens.whole import range_of

    with files_of_command(DataSpec().cache_bytes, patience_s=PATIENCE_S) as files:
        source = open_source(name, files.open)
        if source.vocab_size is not None:
            raise ValueError("has a manifest, which says its vocabulary: it needs no note")
        file = source.train
        with bytes_bar("reading", file.nbytes, quiet=quiet) as advance:
            ids = range_of(file, advance)
    folder, _, last = file.name.rpartition("/")
    storage = Storage(folder or "/", single_writer=True, deadline_s=_DEADLINE_S)
    try:
        storage.write_bytes(last + ENDING, ids.note(source.digest))
    except (OutlastError, OSError) as error:
        raise CliError(
            f"{name}: ids are {ids.smallest} to {ids.largest}, but that cannot be noted beside it "
            f"({error}); jobs on it need data.check_ids: sampled",
            ExitCode.JOB_FAILED,
        ) from error
    return file, ids
