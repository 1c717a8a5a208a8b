"""`outlast login` at an OpenID Connect issuer: at which one, as what, and what a person reads."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli.errors import CliError
from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.access import Access
    from outlast.oidc.device_code import DeviceCode
    from outlast.oidc.issuer import OidcClient
    from outlast.v1.access_pb2 import LoginIssuer

OidcIssuer = Annotated[
    str,
    typer.Option(
        "--oidc-issuer",
        metavar="URL",
        help="The OpenID Connect issuer to get a token from; by default the one that the "
        "controller names, once you agree. With --oidc-client-id nothing is taken from it.",
    ),
]
OidcClientId = Annotated[
    str,
    typer.Option(
        "--oidc-client-id",
        metavar="ID",
        help="As which client of the issuer; by default as the controller says.",
    ),
]
OidcSecretFile = Annotated[
    Path | None,
    typer.Option(
        "--oidc-client-secret-file",
        metavar="FILE",
        help="The client's secret, where the issuer wants one.",
    ),
]
OidcScopes = Annotated[
    list[str],
    typer.Option(
        "--oidc-scope",
        metavar="SCOPE",
        help="What to ask the issuer for; may be repeated. By default what the controller says, "
        "else openid, and email, profile and offline_access where the issuer has them.",
    ),
]
OidcAudience = Annotated[
    str,
    typer.Option(
        "--oidc-audience",
        metavar="AUDIENCE",
        help="What the token must have in aud; by default as the controller says.",
    ),
]
OidcCa = Annotated[
    Path | None,
    typer.Option(
        "--oidc-ca",
        metavar="FILE",
        help="The authority that signed the issuer's certificate; by default those of the system.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a command says of the issuer."""

    issuer: str = ""
    client_id: str = ""
    secret_file: Path | None = None
    scopes: tuple[str, ...] = ()
    audience: str = ""
    ca_file: Path | None = None
    before: OidcClient | None = None
    """As what the login was made that is made again."""

    @property
    def is_any(self) -> bool:
        """Whether it says anything."""
        return self != Wanted(before=self.before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Where a login begins."""

    client: OidcClient
    is_offered: bool
    """Whether the controller named any of it, so that a person must agree."""


def client_of(wanted: Wanted, offered: Sequence[LoginIssuer]) -> Chosen | None:
    """As what to ask which issuer; None where neither the command nor the controller names one.

    Raises:
        CliError: something is missing, or could be any of several.
    """
    from outlast.access import read_text
    from outlast.oidc.issuer import shown

    chosen = _named(wanted, offered)
    if chosen is None:
        if wanted.is_any:
            raise CliError("the controller names no issuer; say which with --oidc-issuer URL")
        return None
    secret, ca = wanted.secret_file, wanted.ca_file
    client = chosen.client
    if wanted.client_id not in ("", client.client_id):
        # A secret is of one client, and no other may be sent it.
        client = replace(client, client_id=wanted.client_id, client_secret="")
    client = replace(
        client,
        client_secret=read_text(secret).strip() if secret is not None else client.client_secret,
        scope=" ".join(wanted.scopes) or client.scope,
        audience=wanted.audience or client.audience,
        ca=read_text(ca) if ca is not None else client.ca,
    )
    if not client.client_id:
        raise CliError(
            f"--oidc-client-id is missing, and the controller names none for {shown(client.issuer)}"
        )
    return replace(chosen, client=client)


def _named(wanted: Wanted, offered: Sequence[LoginIssuer]) -> Chosen | None:
    from outlast.oidc.issuer import OidcClient, shown

    if wanted.before is not None and wanted.issuer in ("", wanted.before.issuer):
        return Chosen(client=wanted.before, is_offered=False)
    if wanted.issuer and wanted.client_id:
        client = OidcClient(issuer=wanted.issuer, client_id=wanted.client_id)
        return Chosen(client=client, is_offered=False)
    fitting = [
        each
        for each in offered
        if wanted.issuer in ("", each.issuer)
        and wanted.client_id in ("", each.client_id)
        and wanted.audience in ("", each.audience)
    ]
    if len(fitting) > 1:
        listed = ", ".join(f"{shown(each.issuer)} as {shown(each.client_id)}" for each in fitting)
        raise CliError(
            "the controller takes tokens of several issuers; choose with --oidc-issuer and "
            f"--oidc-client-id: {listed}"
        )
    if fitting:
        (one,) = fitting
        client = OidcClient(
            issuer=one.issuer, client_id=one.client_id, audience=one.audience, scope=one.scope
        )
        return Chosen(client=client, is_offered=True)
    if not wanted.issuer:
        return None
    return Chosen(client=OidcClient(issuer=wanted.issuer, client_id=""), is_offered=False)


def confirmed(address: str, access: Access, chosen: Chosen) -> Access:
    """The same with a token that a person confirms in a browser.

    Raises:
        CliError: nobody agreed to what the controller offers.
        OutlastError: there is none, or it would travel in clear text.
    """
    from outlast.channel import refuse_clear_text
    from outlast.oidc.device_login import log_in
    from outlast.oidc.issuer import discovery_url

    refuse_clear_text(address, access)
    # Before anything of it is shown.
    discovery_url(chosen.client.issuer)
    _print(f"{address} is to get a token of", *_described(chosen.client))
    if chosen.is_offered:
        _ask(address, chosen.client)
    token, session = log_in(chosen.client, lambda code: _show(address, code))
    return replace(access, token=token, session=session)


def _described(client: OidcClient) -> list[str]:
    from outlast.oidc.issuer import shown

    rows = (
        ("issuer", client.issuer),
        ("client id", client.client_id),
        ("audience", client.audience or "as the issuer has it"),
        ("scopes", client.scope or "openid, and the usual ones that the issuer has"),
    )
    return [f"    {name:<9}  {shown(value)}" for name, value in rows]


def _ask(address: str, client: OidcClient) -> None:
    """A controller could name an issuer and an audience of another service's tokens."""
    from outlast.oidc.issuer import shown

    if not sys.stdin.isatty():
        options = [("--oidc-issuer", client.issuer), ("--oidc-client-id", client.client_id)]
        options += [("--oidc-audience", client.audience)] if client.audience else []
        options += [("--oidc-scope", each) for each in client.scope.split()]
        given = " ".join(f"{name} {shlex.quote(shown(value))}" for name, value in options)
        raise CliError(
            "the controller names this issuer, and without a terminal nobody can agree to it. If "
            f"the token is meant for {address}, give {given}. Have a token? Use --token-file -"
        )
    _print(f"{address} names them, and can use the token wherever else it is taken.")
    # typer.confirm writes to standard output, too.
    print("Log in there? [y/N]", end=" ", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError("not logged in: nothing was changed")


def _print(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _show(address: str, code: DeviceCode) -> None:
    lines = [
        f"To log in to {address}, open",
        f"    {code.url}",
        "in a browser on any device, and enter the code",
        f"    {code.user_code}",
    ]
    if code.url_with_code:
        lines += ["or open this page, and compare the code:", f"    {code.url_with_code}"]
    lines.append(f"Waiting for up to {duration(code.lasts_s)}; Ctrl-C ends it.")
    _print(*lines)
