"""`outlast login` at an OpenID Connect issuer: at which one, as what, and what a person reads."""

from __future__ import annotations

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
        "controller names.",
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


def client_of(wanted: Wanted, offered: Sequence[LoginIssuer]) -> OidcClient | None:
    """As what to ask which issuer; None where neither the command nor the controller names one.

    Raises:
        CliError: something is missing, or could be any of several.
    """
    from outlast.access import read_text

    client = _named(wanted, offered)
    if client is None:
        if wanted.is_any:
            raise CliError("the controller names no issuer; say which with --oidc-issuer URL")
        return None
    secret, ca = wanted.secret_file, wanted.ca_file
    client = replace(
        client,
        client_id=wanted.client_id or client.client_id,
        client_secret=read_text(secret).strip() if secret is not None else client.client_secret,
        scope=" ".join(wanted.scopes) or client.scope,
        audience=wanted.audience or client.audience,
        ca=read_text(ca) if ca is not None else client.ca,
    )
    if not client.client_id:
        raise CliError(
            f"--oidc-client-id is missing, and the controller names none for {client.issuer}"
        )
    return client


def _named(wanted: Wanted, offered: Sequence[LoginIssuer]) -> OidcClient | None:
    from outlast.oidc.issuer import OidcClient, shown

    if wanted.before is not None and wanted.issuer in ("", wanted.before.issuer):
        return wanted.before
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
        return OidcClient(
            issuer=one.issuer, client_id=one.client_id, audience=one.audience, scope=one.scope
        )
    return OidcClient(issuer=wanted.issuer, client_id="") if wanted.issuer else None


def confirmed(address: str, access: Access, client: OidcClient) -> Access:
    """The same with a token that a person confirms in a browser.

    Raises:
        OutlastError: there is none, or it would travel in clear text.
    """
    from outlast.channel import refuse_clear_text
    from outlast.oidc.device_login import log_in

    refuse_clear_text(address, access)
    token, session = log_in(client, lambda code: _show(address, code))
    return replace(access, token=token, session=session)


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
    print(*lines, sep="\n", file=sys.stderr, flush=True)
