"""`outlast login`, `logout`, `logins`, `whoami` and `audit`: who one is, and who did what."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import describe, output
from outlast.cli.connect import controller_of
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.oidc_login import (
    OidcAudience,
    OidcCa,
    OidcClientId,
    OidcIssuer,
    OidcScopes,
    OidcSecretFile,
    Wanted,
    client_of,
    confirmed,
)
from outlast.cli.options import Controller, Json, StateDir

if TYPE_CHECKING:
    from outlast.access import Access, Login, Logins
    from outlast.oidc.issuer import OidcClient
    from outlast.v1.access_pb2 import AuditEntry, WhoAmIResponse

_AUDIT_HEADER = ("WHEN", "CALLER", "FROM", "CALL", "ABOUT", "OUTCOME")
_LOGINS_HEADER = ("", "NAME", "CONTROLLER", "ENCRYPTED", "SHOWS")


_Address = Annotated[
    str,
    typer.Argument(
        metavar="HOST:PORT|NAME",
        help="The controller's gRPC address, or the name of a login, to log in again.",
    ),
]
_Name = Annotated[
    str, typer.Option("--name", metavar="NAME", help="What to call it; by default its host.")
]
_Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca", metavar="FILE", help="ca.crt of the authority that signed its certificate."
    ),
]
_TlsDir = Annotated[
    Path | None,
    typer.Option(
        "--tls-dir",
        metavar="DIR",
        help="ca.crt, with your tls.crt and tls.key where it asks for certificates.",
    ),
]
_TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="Your token; '-' reads standard input. Without it you are asked for one, or get it "
        "from an issuer.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(login)
    app.command()(logout)
    app.command()(logins)
    app.command()(whoami)
    app.command()(audit)


def login(
    address: _Address,
    name: _Name = "",
    ca: _Ca = None,
    tls_dir: _TlsDir = None,
    token_file: _TokenFile = None,
    oidc_issuer: OidcIssuer = "",
    oidc_client_id: OidcClientId = "",
    oidc_client_secret_file: OidcSecretFile = None,
    oidc_scope: OidcScopes = [],  # noqa: B006  # typer's own way to say that it may be repeated
    oidc_audience: OidcAudience = "",
    oidc_ca: OidcCa = None,
) -> None:
    """Log in to a controller, which commands mean from then on when none is named.

    Where the controller names an OpenID Connect issuer and you agree to it, or you name one, you
    confirm a code in a browser, on any device; the token is renewed before a call once it has
    expired. Nothing is kept unless the controller answers. A token is kept in a file that only
    you can read.
    """
    from outlast.access import Login, Logins, change_logins, logins_file

    wanted = Wanted(
        issuer=oidc_issuer,
        client_id=oidc_client_id,
        secret_file=oidc_client_secret_file,
        scopes=tuple(oidc_scope),
        audience=oidc_audience,
        ca_file=oidc_ca,
    )
    if token_file is not None and wanted.is_any:
        raise CliError("give --token-file, or the --oidc options for a token of an issuer")
    with _explained(in_clear=ca is None and tls_dir is None):
        known = _known()
        before = known.by_name.get(address)
        access = _given_access(ca, tls_dir, before)
        if token_file is not None:
            access = replace(access, token=_token_in(token_file))
        at = before.address if before is not None else address
        called = name or (address if before is not None else _free_name(at, known))
        wanted = replace(wanted, before=_client_of(before or known.by_name.get(called), at))
        may_ask, is_again = token_file is None, before is not None
        access, me = _asked(at, access, wanted, may_ask=may_ask, is_again=is_again)
        entry = Login(address=at, access=access)
        change_logins(
            logins_file(),
            lambda now: Logins(current=called, by_name={**now.by_name, called: entry}),
        )
    print(f"{called}: {_in_words(me)}")


def logout(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Which login; by default the one in use.")
    ] = "",
) -> None:
    """Forget a login, and end it at its issuer. Commands without a controller mean the one on this
    machine again."""
    from outlast.access import Logins, change_logins, logins_file

    forgotten: list[tuple[str, Login]] = []

    def without(known: Logins) -> Logins:
        gone = name or known.current
        if gone not in known.by_name:
            listed = ", ".join(known.by_name) or "none"
            raise CliError(f"no login {gone!r}; there are: {listed}" if gone else "no login in use")
        forgotten[:] = [(gone, known.by_name[gone])]
        kept = {each: entry for each, entry in known.by_name.items() if each != gone}
        return Logins(current="" if known.current == gone else known.current, by_name=kept)

    with _explained():
        change_logins(logins_file(), without)
    for gone, entry in forgotten:
        print(f"{gone}: forgotten{_ended(entry)}")


def _ended(login: Login) -> str:
    """What became of a forgotten login at its issuer, in words."""
    from outlast.oidc.revocation import why_not_ended

    session = login.access.session
    if session is None:
        return ""
    issuer = session.client.issuer
    if why_not := why_not_ended(session):
        return f"; at {issuer} the login goes on, as {why_not}"
    return f", and ended at {issuer}"


def logins(
    use: Annotated[
        str, typer.Option("--use", metavar="NAME", help="Have commands mean this one.")
    ] = "",
    json: Json = False,
) -> None:
    """List the controllers that you are logged in to; * is the one in use."""
    from outlast.access import change_logins, logins_file

    def using(known: Logins) -> Logins:
        if use not in known.by_name:
            listed = ", ".join(known.by_name) or "none"
            raise CliError(f"no login {use!r}; there are: {listed}")
        return replace(known, current=use)

    with _explained():
        known = change_logins(logins_file(), using) if use else _known()
    if json:
        listed_json = [
            {"name": name, "controller": each.address, "current": name == known.current}
            for name, each in known.by_name.items()
        ]
        output.print_json({"logins": listed_json})
        return
    rows = [_row(name, each, known.current) for name, each in known.by_name.items()]
    output.print_table(_LOGINS_HEADER, rows, empty="no logins; `outlast login` makes one")


def whoami(
    controller: Controller = "", state_dir: StateDir = DEFAULT_STATE_DIR, json: Json = False
) -> None:
    """Say who you are to the controller, and in which role."""
    with controller_of(controller, state_dir) as client:
        me = client.who_am_i()
    if json:
        output.print_json({"name": me.name, "role": me.role, "asked": me.asked})
    else:
        print(_in_words(me))


def audit(
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
    hours: Annotated[
        float, typer.Option("--hours", metavar="N", min=0.0, help="Of the last hours; 0: all.")
    ] = 0.0,
    caller: Annotated[
        str, typer.Option("--caller", metavar="NAME", help="Only what this one called.")
    ] = "",
    most: Annotated[
        int, typer.Option("--most", metavar="N", min=0, help="At most so many; 0: all.")
    ] = 100,
    json: Json = False,
) -> None:
    """List who changed something, or was refused, newest first. For admins."""
    since_s = time.time() - hours * 3600.0 if hours else 0.0
    with controller_of(controller, state_dir) as client:
        entries = client.audit(most=most, since_s=since_s, caller=caller)
    if json:
        for entry in entries:
            output.print_json_line(_entry_json(entry))
        return
    rows = [_audit_row(entry) for entry in entries]
    output.print_table(_AUDIT_HEADER, rows, empty="nothing was changed or refused")


def _asked(
    address: str, access: Access, wanted: Wanted, *, may_ask: bool, is_again: bool
) -> tuple[Access, WhoAmIResponse]:
    """Who a controller says one is; where it wants a token, with one of an issuer, or typed."""
    import grpc

    from outlast.client import RefusedError

    refused = None
    try:
        me = _me(address, access)
        # A token of an issuer goes before a certificate that would be enough.
        if not (may_ask and (wanted.is_any or wanted.before is not None)):
            return access, me
        if not me.asked:
            if wanted.is_any:
                raise CliError("the controller asks nobody who he is; leave out the --oidc options")
            return access, me
    except RefusedError as error:
        if error.code is not grpc.StatusCode.UNAUTHENTICATED or access.token:
            raise
        refused = error
        # By its address, what a controller names now goes before what it named then.
        if refused.issuers and not is_again:
            wanted = replace(wanted, before=None)
    issuers = refused.issuers if refused is not None else ()
    if (chosen := client_of(wanted, issuers)) is not None:
        access = confirmed(address, access, chosen)
    elif refused is not None and not (may_ask and sys.stdin.isatty()):
        raise refused
    else:
        access = replace(access, token=typer.prompt("Token", hide_input=True).strip())
    return access, _me(address, access)


def _me(address: str, access: Access) -> WhoAmIResponse:
    from outlast.client import Client

    # A login that is only being made is in no file yet, and there is nothing to renew.
    with Client(address, access=replace(access, session=None)) as client:
        return client.who_am_i()


def _given_access(ca: Path | None, tls_dir: Path | None, before: Login | None) -> Access:
    from outlast.access import Access, read_text, read_tls_dir

    if ca is not None and tls_dir is not None:
        raise CliError("give --ca or --tls-dir, which has its own ca.crt")
    if tls_dir is not None:
        return read_tls_dir(tls_dir)
    if ca is None and before is not None:
        return replace(before.access, token="", session=None)
    return Access() if ca is None else Access(ca=read_text(ca))


def _client_of(login: Login | None, address: str) -> OidcClient | None:
    """As what a login was made at an issuer, if it is of that controller."""
    if login is None or login.address != address or login.access.session is None:
        return None
    return login.access.session.client


def _free_name(address: str, known: Logins) -> str:
    """The host's name; the whole address where another controller is called so."""
    host = address.rpartition(":")[0].strip("[]")
    taken = known.by_name.get(host)
    return host if taken is None or taken.address == address else address


def _token_in(path: Path) -> str:
    from outlast.access import read_text

    text = sys.stdin.read() if str(path) == "-" else read_text(path)
    if not (token := text.strip()):
        raise CliError(f"--token-file {path} is empty")
    return token


def _known() -> Logins:
    from outlast.access import logins_file, read_logins

    return read_logins(logins_file())


@contextmanager
def _explained(*, in_clear: bool = False) -> Iterator[None]:
    from outlast.client import UnavailableError
    from outlast.errors import OutlastError

    try:
        yield
    except UnavailableError as error:
        # A login of before may have had the certificate.
        hint = "; one that encrypts needs --ca" if in_clear else ""
        raise CliError(f"{error}{hint}", ExitCode.NO_CONTROLLER) from error
    except OutlastError as error:
        raise CliError(str(error)) from error


def _in_words(me: WhoAmIResponse) -> str:
    if not me.asked:
        return "the controller asks nobody who he is; you may do everything"
    return f"you are {me.name}, {me.role}"


def _row(name: str, entry: Login, current: str) -> tuple[str, ...]:
    access = entry.access
    shows = [
        word
        for word, is_shown in (("token", access.token), ("certificate", access.certificate))
        if is_shown
    ]
    return (
        "*" if name == current else "",
        name,
        entry.address,
        "yes" if access.ca else "no",
        " and ".join(shows) or "nothing",
    )


def _audit_row(entry: AuditEntry) -> tuple[str, ...]:
    host = entry.peer.rpartition(":")[0].partition(":")[2] or entry.peer
    outcome = f"{entry.outcome}: {entry.why}" if entry.why else entry.outcome
    return (
        describe.short_clock(entry.at_s, time.time()),
        entry.caller or "-",
        host,
        entry.call,
        entry.about or "-",
        outcome,
    )


def _entry_json(entry: AuditEntry) -> dict[str, object]:
    names = ("at_s", "caller", "role", "peer", "call", "about", "outcome", "why")
    return {name: getattr(entry, name) for name in names}
