"""`outlast certs`: a private authority, and the certificates of controllers, nodes and people."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import output
from outlast.cli.errors import CliError
from outlast.cli.usage import Commands

if TYPE_CHECKING:
    from controller.access.authority import Subject

_DAYS_MAX = 36_500
# Of a common name, by X.509.
_MAX_NAME = 64
_HOST = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9.]{0,251}[A-Za-z0-9])?")

Authority = Annotated[
    Path,
    typer.Argument(metavar="CA", help="Folder of the authority: ca.crt, and ca.key, its secret."),
]
Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder with tls.crt, tls.key and ca.crt.")
]


Days = Annotated[
    int, typer.Option("--days", metavar="N", min=1, max=_DAYS_MAX, help="How long it holds.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    group = Commands(
        no_args_is_help=True,
        help="A private authority, and certificates for controllers, nodes and people.",
    )
    group.command("init")(init)
    group.command("issue")(issue)
    group.command("rotate")(rotate)
    group.command("show")(show)
    app.add_typer(group, name="certs")


def init(
    authority: Authority,
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="What the authority is called.")
    ] = "Outlast",
    days: Days = 3650,
) -> None:
    """Make a private authority. Keep its folder off the cluster, but for one of --node-ca."""
    from controller.access.authority import CA_KEY_FILE, make_authority
    from outlast.access import CA_FILE, AccessError

    if not 1 <= len(name) <= _MAX_NAME:
        raise CliError(f"--name has {len(name)} characters; allowed: 1 to {_MAX_NAME}")
    try:
        make_authority(authority.expanduser(), name, days)
    except AccessError as error:
        raise CliError(str(error)) from error
    print(f"{authority / CA_FILE}: give this to controllers, nodes and people.")
    print(f"{authority / CA_KEY_FILE}: the secret that signs; nobody else needs it.")


def issue(
    authority: Authority,
    into: Folder,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME",
            help="For a controller: a name or address that it is called by, beside localhost; may "
            "be repeated.",
        ),
    ] = None,
    node: Annotated[
        str, typer.Option("--node", metavar="NODE", help="For the agent of this node.")
    ] = "",
    user: Annotated[
        str, typer.Option("--user", metavar="NAME", help="For a person or a program.")
    ] = "",
    role: Annotated[
        str,
        typer.Option(
            "--role", metavar="ROLE", help="Of a user: viewer, submitter, operator or admin."
        ),
    ] = "viewer",
    days: Days = 365,
) -> None:
    """Make a certificate with its key: for a controller, a node or a user.

    The controller takes nodes and users with a certificate where it was started with
    --client-certificates.
    """
    from controller.access.authority import LOCAL_HOSTS, Subject
    from controller.access.roles import NODE, ROLES
    from controller.access.tokens import TokensError, check_name

    if sum(map(bool, (host, node, user))) != 1:
        raise CliError("give one of --host, for a controller, --node and --user")
    if role not in ROLES:
        raise CliError(f"--role is {role!r}; allowed: {', '.join(ROLES)}")
    if host:
        _check_hosts(host)
        subject = Subject(name=host[0][:_MAX_NAME], hosts=(*host, *LOCAL_HOSTS))
    else:
        try:
            check_name(node or user)
        except TokensError as error:
            raise CliError(str(error)) from error
        subject = Subject(name=node or user, role=NODE if node else role)
    _issue(authority, subject, days, into)


def rotate(authority: Authority, into: Folder, days: Days = 365) -> None:
    """Replace a certificate and its key by new ones for the same names.

    Controllers and agents take them up by themselves, at the next connection; a person logs in
    with them again.
    """
    from controller.access.authority import CA_KEY_FILE, show
    from outlast.access import AccessError

    if (into.expanduser() / CA_KEY_FILE).exists():
        raise CliError(f"{into} is an authority's; give the folder of a certificate")
    try:
        subject = show(into.expanduser()).subject
    except AccessError as error:
        raise CliError(str(error)) from error
    _issue(authority, subject, days, into)


def show(folder: Folder) -> None:
    """Say whom the certificate in a folder names, and until when it holds."""
    from controller.access.authority import show
    from outlast.access import AccessError

    try:
        shown = show(folder.expanduser())
    except AccessError as error:
        raise CliError(str(error)) from error
    subject = shown.subject
    lines = [("name", subject.name)]
    lines += [("role", subject.role)] if subject.role else []
    lines += [("hosts", ", ".join(subject.hosts))] if subject.hosts else []
    output.print_lines([*lines, ("until", f"{shown.until:%Y-%m-%d %H:%M} UTC")])


def _check_hosts(names: Sequence[str]) -> None:
    for name in names:
        if _HOST.fullmatch(name):
            continue
        try:
            ipaddress.ip_address(name)
        except ValueError as error:
            raise CliError(
                f"--host is {name!r}; allowed: a name of letters, digits, '-' and '.', or an "
                "address, without a port"
            ) from error


def _issue(authority: Path, subject: Subject, days: int, into: Path) -> None:
    from controller.access.authority import issue
    from outlast.access import AccessError

    try:
        until = issue(authority.expanduser(), subject, days, into.expanduser())
    except AccessError as error:
        raise CliError(str(error)) from error
    what = f"{subject.role} {subject.name}" if subject.role else f"controller {subject.name}"
    print(f"{into}: certificate of {what}, until {until:%Y-%m-%d}")
