"""`outlast backup` and `outlast restore`: the controller's state as one file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import StateDir

if TYPE_CHECKING:
    from controller.store.backup import Manifest


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(backup)
    app.command()(restore)


def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where to; replaced if it is there.")
    ],
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Copy the controller's state to a file, while it runs.

    In it are jobs with their specs and incidents, nodes, loss curves, runs of diagnostics and code
    that jobs bring along; not checkpoints, logs, tokens and certificates. It runs where the
    controller does, as a user who may read its state folder.
    """
    from controller.store.backup import back_up

    to = file.expanduser()
    made = _done(lambda: back_up(state_dir.expanduser(), to, now_s=time.time()))
    size_mb = to.stat().st_size / 1e6
    print(f"{file}: the state in term {made.term} ({made.made}), {size_mb:.1f} MB.")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `outlast backup` has made.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    force: Annotated[
        bool,
        typer.Option("--force", help="Set a journal that is there aside, in a folder beside it."),
    ] = False,
) -> None:
    """Put the controller's state back from a file, while no controller runs.

    The controller that is started there next goes on with the jobs as they were when the copy was
    made.
    """
    from controller.store import backup

    to = state_dir.expanduser()
    found = _done(lambda: backup.restore(file.expanduser(), to, force=force, now_s=time.time()))
    print(f"{state_dir} has the state in term {found.term} ({found.made}).")
    print("The next controller with this --state-dir goes on from there.")


def _done(work: Callable[[], Manifest]) -> Manifest:
    from outlast.errors import FatalError

    try:
        return work()
    except FatalError as error:
        raise CliError(str(error)) from error
