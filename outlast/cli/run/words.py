"""The words of `outlast run`, which torchrun's own parser reads, as the other commands show theirs.

The library that parses the commands of `outlast` knows the flags for help and completion only:
torchrun has values in environment variables, beginnings of flags, and a script whose arguments
are its own.
"""

from __future__ import annotations

import inspect
import os
from argparse import Action
from typing import Annotated, Any

import typer

from outlast.cli.usage import Command, UsageError
from outlast.torchrun.flags import NO_EFFECT, PROGRAM, RunOptions, run_options
from outlast.torchrun.parser import FlagError, HelpWantedError, add_own_flags, flag_parser

# What stands for a flag's value in the help.
_METAVARS = {
    "nnodes": "N|MIN:MAX",
    "nproc_per_node": "N|gpu|cpu|auto",
    "nodes": "N",
    "server": "HOST:PORT",
    "max_restarts": "N",
    "rdzv_id": "ID",
    "role": "NAME",
    "log_dir": "DIR",
    "redirects": "STREAMS",
    "tee": "STREAMS",
    "local_ranks_filter": "RANKS",
    "shutdown_timeout": "SECONDS",
    "code": "DIR",
}


class RunCommand(Command):
    """A command whose flags are torchrun's."""

    def __init__(self, *args: Any, **settings: Any) -> None:  # what typer takes
        super().__init__(*args, **settings)
        self.params = [*_flags(), *self.params]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's vendored base type is private
        try:
            run_options(args, os.environ)
        except HelpWantedError:
            print(ctx.get_help())
            ctx.exit()
        except FlagError as error:
            raise UsageError(error.message, ctx=ctx) from error
        # None of them is an option to the library.
        return super().parse_args(ctx, ["--", *args])


def read_words(words: list[str]) -> RunOptions:
    """What a command line asks for that `RunCommand` has let pass."""
    return run_options(words, os.environ)


def _flags() -> list[Any]:
    """torchrun's flags and our own, for the help; those without an effect are not shown there."""
    parser = flag_parser({}, PROGRAM)
    add_own_flags(parser)
    shown = [action for action in parser._actions if action.option_strings]
    # Our own first.
    shown.sort(key=lambda action: action.dest not in ("nodes", "server"))
    stub: Any = lambda **given: None  # noqa: E731  # it is never called
    stub.__signature__ = inspect.Signature(
        [_parameter(action) for action in shown if action.dest != "help"]
    )
    app = typer.Typer(add_completion=False)
    app.command()(stub)
    flags: list[Any] = typer.main.get_command(app).params
    for flag in flags:
        flag.expose_value = False
    return flags


def _parameter(action: Action) -> inspect.Parameter:
    is_switch = action.nargs == 0
    # Of two spellings that differ in a dash, the one with dashes.
    spellings = [each for each in action.option_strings if "_" not in each]
    text = action.help or action.dest
    option = typer.Option(
        *spellings,
        metavar=None if is_switch else _METAVARS.get(action.dest, "VALUE"),
        help=f"{text[0].upper()}{text[1:]}.",
        hidden=action.dest in NO_EFFECT,
        show_default=False,
    )
    return inspect.Parameter(
        action.dest,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if is_switch else "",
        annotation=Annotated[bool if is_switch else str, option],
    )
