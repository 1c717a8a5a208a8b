"""`outlast notify`: a test message to the receivers of a controller's configuration."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from outlast.cli import output
from outlast.cli.errors import CliError, ExitCode, bad_input


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(notify)


def notify(
    config: Annotated[
        Path,
        typer.Option(
            "--config",
            envvar="OUTLAST_CONFIG",
            metavar="FILE",
            help="The controller's configuration, with its section `notify`.",
        ),
    ],
    receiver: Annotated[
        str,
        typer.Option("--receiver", metavar="KIND.NAME", help="Only this one, such as slack.team."),
    ] = "",
) -> None:
    """Send a test message to everybody whom a controller with this configuration notifies.

    It goes from this machine, with the files that the configuration names here.
    """
    from controller import config_file
    from controller.notify import senders
    from controller.notify.example import example
    from outlast.errors import OutlastError

    with bad_input():
        settings = config_file.read(config).notify
    receivers = {name: each for name, each in settings.receivers.items() if receiver in ("", name)}
    if not receivers:
        if not settings.receivers:
            raise CliError(f"{config} names no receivers; add some in its section `notify`")
        known = ", ".join(settings.receivers)
        raise CliError(f"{config} has no receiver {receiver}; it has: {known}")
    failed = 0
    for name, each in receivers.items():
        try:
            senders.send(each, example(time.time()), settings.page)
        except OutlastError as error:
            failed += 1
            output.print_message(f"{name}: {error}")
        else:
            print(f"{name}: sent")
    if failed:
        raise typer.Exit(ExitCode.JOB_FAILED)
