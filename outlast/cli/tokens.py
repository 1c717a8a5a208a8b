"""`outlast tokens`: who may call a controller, kept in a file of digests."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from outlast.cli import output
from outlast.cli.errors import CliError
from outlast.cli.options import Json
from outlast.cli.usage import Commands

if TYPE_CHECKING:
    from controller.access.tokens import Entry, Known

_Result = TypeVar("_Result")
_HEADER = ("NAME", "ROLE", "UNTIL")

File = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="The file that the controller has as --tokens-file."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Whose token it is.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = Commands(
        no_args_is_help=True,
        help="Who may call a controller: its file of tokens, which has only their digests.",
    )
    group.command("add")(add)
    group.command("list")(list_tokens)
    group.command("remove")(remove)
    app.add_typer(group, name="tokens")


def add(
    file: File,
    name: Name,
    role: Annotated[
        str, typer.Option("--role", metavar="ROLE", help="viewer, submitter, operator or admin.")
    ],
    days: Annotated[
        int,
        typer.Option(
            "--days", metavar="N", min=0, max=36_500, help="How long it holds; 0: for ever."
        ),
    ] = 0,
) -> None:
    """Make a token, print it, and put its digest into the file.

    It is shown this once. The controller takes it at once, without a restart.
    """
    from controller.access.roles import ROLES
    from controller.access.tokens import Entry, check_name, new_token

    if role not in ROLES:
        raise CliError(f"--role is {role!r}; allowed: {', '.join(ROLES)}")
    token, digest = new_token()
    today = datetime.datetime.now(datetime.UTC).date()
    until = today + datetime.timedelta(days=days) if days else None
    _check(lambda: check_name(name))
    made = Entry(name=name, role=ROLES[role], sha256=digest, until=until)

    def added(known: Known) -> Known:
        if any(entry.name == name for entry in known.entries):
            raise CliError(f"{name} has a token already; `outlast tokens remove` takes it away")
        return replace(known, entries=(*known.entries, made))

    _change(file, added)
    print(token)


def list_tokens(file: File, json: Json = False) -> None:
    """List who has a token, in which role and until when; and who else issues tokens."""
    known = _read(file)
    if json:
        tokens = [
            {"name": each.name, "role": each.role.word, "until": _day(each, "") or None}
            for each in known.entries
        ]
        output.print_json([*tokens, *(each.document() for each in known.issuers)])
        return
    rows = [(each.name, each.role.word, _day(each, "-")) for each in known.entries]
    output.print_table(_HEADER, rows, empty="no tokens")
    for each in known.issuers:
        roles = ", ".join(f"{value} {role.word}" for value, role in each.roles.items())
        print()
        output.print_wrapped(
            f"also tokens of {each.issuer} for {each.audience}, called by {each.name}; by "
            f"{each.role_claim}: {roles}"
        )


def remove(file: File, name: Name) -> None:
    """Take a token away. The controller refuses it from then on."""

    def without(known: Known) -> Known:
        kept = tuple(entry for entry in known.entries if entry.name != name)
        if len(kept) == len(known.entries):
            others = ", ".join(entry.name for entry in known.entries) or "nobody"
            raise CliError(f"{file} has no token of {name}; it has: {others}")
        return replace(known, entries=kept)

    # A file that is not there is said to be so.
    _read(file)
    _change(file, without)
    print(f"{name} has no token any more")


def _day(entry: Entry, missing: str) -> str:
    return entry.until.isoformat() if entry.until else missing


def _read(file: Path) -> Known:
    from controller.access import tokens

    return _check(lambda: tokens.read(file.expanduser()))


def _change(file: Path, changed: Callable[[Known], Known]) -> None:
    from controller.access import tokens

    _check(lambda: tokens.change(file.expanduser(), changed))


def _check(work: Callable[[], _Result]) -> _Result:
    from controller.access.tokens import TokensError

    try:
        return work()
    except TokensError as error:
        raise CliError(str(error)) from error
