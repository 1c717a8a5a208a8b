"""Which folder of checkpoints a word names: a job, by name or id, or a URL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import completion
from outlast.cli.connect import controller_of, find_job
from outlast.cli.errors import CliError, ExitCode

if TYPE_CHECKING:
    from checkpoint.storage.storage import Storage

Folder = Annotated[
    str,
    typer.Argument(
        metavar="JOB|URL",
        autocompletion=completion.jobs,
        help="A job's name or id, or the URL of its checkpoints, which `outlast status` prints "
        "and which ends in its id: a path, or any URL that fsspec reads.",
    ),
]
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|[./~]|.*/")
_MAX_NAMED = 8


def is_url(word: str) -> bool:
    """Whether a word is a folder or a URL, and no job."""
    return _URL.match(word) is not None or Path(word).is_dir()


def url_of(word: str, controller: str, state_dir: Path) -> str:
    """The URL itself, or the one that the controller has for the job of this name.

    Raises:
        CliError: there is no such job, or no controller to ask.
    """
    if is_url(word):
        return word
    try:
        with controller_of(controller, state_dir) as client:
            return find_job(client, word).checkpoint_url
    except CliError as error:
        raise CliError(
            f"{word!r} is no URL or folder, so it should be a job: {error}", error.code
        ) from error


def nothing_there(storage: Storage, url: str) -> CliError:
    """What is to be said where no checkpoint is."""
    from outlast.errors import OutlastError

    try:
        entries = storage.entries("")
    except OutlastError:
        entries = []
    if any(entry.name == "owner.json" for entry in entries):
        why = "it is a job's folder, and nothing was committed there yet"
    elif entries:
        names = ", ".join(entry.name for entry in entries[:_MAX_NAMED])
        why = f"the URL is a job's own folder, with its id at the end; there is {names}"
    else:
        why = "there is no such folder, or it is empty; `outlast status JOB` prints a job's URL"
    return CliError(f"{url}: no checkpoints; {why}", ExitCode.BAD_INPUT)
