"""Commands and groups of `outlast`, with help and usage errors in the words of its users.

The library that parses the command line names Python's types in help, and its errors speak
of the checks that it makes. Here options and arguments are called what they hold, and a
value that is refused is named with what is allowed. What does not belong here: any command.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from outlast.cli import output
from outlast.problems import shown

# Typer keeps the class of its other usage errors private.
UsageError: Any = typer.BadParameter.__mro__[1]

_TYPE = re.compile(r"\s*<[^<>]*>")
_RANGE = re.compile(r"(?:(-?[\d.]+)<=)?\bx(?:([<>]=)(-?[\d.]+))")


class Command(TyperCommand):
    """A command with plain help and plain errors."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer's vendored base type is private
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            raise _explained(error, ctx) from error
        except UsageError as error:
            _say_what_was_meant(error, self)
            raise

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # as above
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    """A group of commands with plain help."""

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]  # as above
        _write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)


class ListingGroup(Group):
    """Runs `list` unless the first word is another of its commands."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # as above
        wants_help = bool(args) and args[0] in ("--help", "-h")
        if not wants_help and (not args or args[0] not in self.commands):
            args = ["list", *args]
        return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """Where commands are registered: each becomes one of ours."""

    def __init__(self, **settings: Any) -> None:  # what typer takes
        super().__init__(**{"cls": Group, **settings})

    def command(self, *args: Any, **settings: Any) -> Callable[[Any], Any]:  # as above
        return super().command(*args, **{"cls": Command, **settings})


def print_usage_error(error: Any) -> None:  # a `UsageError`
    """How the command is used and what was wrong, to standard error."""
    text = io.StringIO()
    error.show(text)
    for line in text.getvalue().splitlines():
        output.print_message(line)


def _write_options(command: Any, ctx: typer.Context, formatter: Any) -> None:  # as above
    """Arguments and options, without the names of Python's types."""
    for title, kind in (("Arguments", "argument"), ("Options", "option")):
        records = [
            (_TYPE.sub("", record[0]), _RANGE.sub(_limits, record[1]))
            for parameter in command.get_params(ctx)
            if parameter.param_type_name == kind
            and (record := parameter.get_help_record(ctx)) is not None
        ]
        if records:
            with formatter.section(title):
                formatter.write_dl(records)


def _limits(found: re.Match[str]) -> str:
    low, sign, bound = found.groups()
    if low is not None:
        return f"{low} to {bound}"
    return f"at least {bound}" if sign == ">=" else f"at most {bound}"


def _explained(error: typer.BadParameter, ctx: typer.Context) -> Exception:
    """The same error with the value and what is allowed, where a number was refused."""
    checked: Any = error.__cause__
    kind = str(getattr(getattr(error.param, "type_descriptor", None), "annotation", ""))
    if error.param is None or not hasattr(checked, "errors") or not re.search("int|float", kind):
        return error
    given = _shown(checked.errors()[0]["input"])
    name = error.param.get_error_hint().replace("'", "")
    low, high = getattr(error.param, "min", None), getattr(error.param, "max", None)
    what = "a whole number" if "int" in kind else "a number"
    if low is not None and high is not None:
        what += f" from {low} to {high}"
    elif low is not None or high is not None:
        what += f", {high} or less" if low is None else f", {low} or more"
    return typer.BadParameter(f"{name} is {given}; allowed: {what}", ctx=ctx)


def _shown(given: object) -> str:
    """A number as it was written, other words in quotes."""
    text = str(given)
    return text if re.fullmatch(r"-?[\d.]+", text) else shown(text)


def _say_what_was_meant(error: Any, command: TyperCommand) -> None:  # a `UsageError`
    """Add to the message, if no such option exists, what was probably meant."""
    if not hasattr(error, "possibilities"):
        return
    # The library calls --help near to any short option.
    error.possibilities = [each for each in error.possibilities or () if each != "--help"]
    name = str(error.option_name)
    arguments = {
        word: parameter.metavar
        for parameter in command.params
        if parameter.param_type_name == "argument" and parameter.metavar
        for word in parameter.metavar.lower().split("|")
    }
    meant = arguments.get(name.lstrip("-").lower())
    if meant is not None:
        error.message += f"; write {meant} alone, without {name}, as in the usage line above"
