"""The `outlast` command.

Each command lives in the module of its subject and imports what it needs when
it runs: `outlast --help` must not pay for grpc, pydantic or torch. This module
only puts the commands together and turns errors into messages and exit codes.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from outlast import __version__
from outlast.cli import (
    archive,
    backup,
    certs,
    checkpoints,
    data,
    demo,
    diagnose,
    evaluate,
    fleet,
    generate,
    hugging_face,
    incidents,
    jobs,
    login,
    models,
    notify,
    output,
    planning,
    queue,
    report,
    serve,
    tokens,
)
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.run import command as running
from outlast.cli.simulation import command as simulation
from outlast.cli.usage import Commands, UsageError, print_usage_error
from outlast.startup import ShadowedError, check_packages

_EPILOG = (
    "Exit codes: 0 done; 1 the job (or a check) failed; 2 bad usage, spec or request; "
    "3 no controller answers; 130 interrupted."
)

app = Commands(
    name="outlast",
    help="Keep large training jobs running through failures.",
    epilog=_EPILOG,
    no_args_is_help=True,
    # Importing rich costs more than the rest of --help together.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; the process's exit code says how it went."""
    try:
        check_packages()
        # Left to itself it prints errors, too, in lines of any length.
        code = app(prog_name="outlast", standalone_mode=False)
        sys.exit(ExitCode.OK if code is None else code)
    except ShadowedError as error:
        output.print_message(f"outlast: {error}")
        sys.exit(ExitCode.BAD_INPUT)
    except CliError as error:
        output.print_message(f"outlast: {error}")
        sys.exit(error.code)
    except UsageError as error:
        print_usage_error(error)
        sys.exit(ExitCode.BAD_INPUT)
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"outlast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


running.register(app)
serve.register(app)
jobs.register(app)
queue.register(app)
incidents.register(app)
report.register(app)
fleet.register(app)
diagnose.register(app)
checkpoints.register(app)
archive.register(app)
backup.register(app)
notify.register(app)
login.register(app)
tokens.register(app)
certs.register(app)
planning.register(app)
models.register(app)
data.register(app)
hugging_face.register(app)
generate.register(app)
evaluate.register(app)
simulation.register(app)
demo.register(app)


if __name__ == "__main__":
    main()
