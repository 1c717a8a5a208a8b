"""What an OpenID Connect issuer says of itself, and the tokens that it gives. Pure.

Its discovery document (OpenID Connect Discovery 1.0) names the endpoints of the OAuth 2.0 Device
Authorization Grant (RFC 8628). A client reads claims without a check of the signature: they came
over a connection to the issuer, and it is the controller that must believe them.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from outlast.errors import FatalError, RetryableError

WELL_KNOWN = "/.well-known/openid-configuration"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# `openid` is what makes it OpenID Connect; the others where the issuer has them. A refresh token
# takes `offline_access` at many.
_SCOPES = ("openid", "email", "profile", "offline_access")
# Of what somebody else's server says in a message of ours.
_MAX_TEXT = 300
# Of a token that is kept: some have a few thousand letters, for a group each.
_MAX_TOKEN = 1 << 16
# No time of the next millions of years, and no float can be too small for it.
_NEVER_S = 1e15


class LoginError(FatalError):
    """The issuer gives no token; a person must act."""


class IssuerUnavailableError(RetryableError):
    """The issuer does not answer, or not now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcClient:
    """As what to ask which issuer for a token."""

    issuer: str
    client_id: str
    client_secret: str = ""
    """Some issuers give one to programs, too, where it is no secret."""
    audience: str = ""
    """What the token must have in aud; empty: whatever the issuer puts there."""
    scope: str = ""
    """Separated by spaces; empty: `openid` and the usual ones that the issuer has."""
    ca: str = ""
    """PEM; the authority behind the issuer's certificate. Empty: those of the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A login at an issuer, which renews its token."""

    id: str
    """By which it is found in the file of logins, whatever it is called there."""
    client: OidcClient
    refresh_token: str = ""
    """Empty: the issuer gave none, and the token cannot be renewed."""
    expires_s: float = 0.0
    """When the token expires by this machine's clock, since 1970; 0: as its exp says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Where an issuer answers, and how."""

    token: str
    device: str
    """Empty: it has no device authorization."""
    revocation: str = ""
    """Empty: it takes no token back, or over an open line only: no login fails for that."""
    scopes: tuple[str, ...] = ()
    secret_in_form: bool = False
    """Whether it takes a client's secret in the form; else in the header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To a form that was sent to an endpoint."""

    status: int
    document: Mapping[str, Any]

    @property
    def is_busy(self) -> bool:
        """Whether the same form may be taken later."""
        return self.status == 429 or self.status >= 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What an issuer gave."""

    id_token: str = ""
    access_token: str = ""
    refresh_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A form for an endpoint."""

    url: str
    form: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict)


def is_safe(url: str) -> bool:
    """Whether nobody on the way can change what is read there, and a person sees where it is."""
    # Browsers take a backslash for a slash, and what is before an @ looks like a host.
    if not (url.isascii() and url.isprintable()) or set(url) & set(" \\"):
        return False
    try:
        found = urlsplit(url)
        _ = found.port
    except ValueError:
        return False
    is_here = found.scheme == "http" and found.hostname in _LOOPBACK
    return bool(found.hostname) and "@" not in found.netloc and (found.scheme == "https" or is_here)


def is_safe_for(url: str, issuer: str) -> bool:
    """Whether it is, as a URL that this issuer names: one elsewhere names none of this machine."""
    return is_safe(url) and (url.startswith("https:") or issuer.startswith("http:"))


def discovery_url(issuer: str) -> str:
    """Where the document of an issuer is.

    Raises:
        LoginError: it would be read over an open line, or is no URL of an issuer.
    """
    # OpenID Connect Discovery 1.0, section 3: neither query nor fragment.
    if not is_safe(issuer) or set(issuer) & set("?#"):
        raise LoginError(
            f"the issuer is {shown(issuer)!r}; allowed: an https:// URL, or http:// on this "
            "machine, without a user, a query or a fragment"
        )
    return issuer.rstrip("/") + WELL_KNOWN


def endpoints_in(document: object, issuer: str) -> Endpoints:
    """What the discovery document says.

    Raises:
        LoginError: what is wrong with it.
    """
    where = f"the discovery document {discovery_url(issuer)}"
    if not isinstance(document, dict):
        raise LoginError(f"{where} is no JSON object")
    if (said := document.get("issuer")) != issuer:
        raise LoginError(
            f"{where} has the issuer {shown(said)!r}, not {issuer!r}; the two must be the same, "
            "to the last slash"
        )
    methods = document.get("token_endpoint_auth_methods_supported")
    scopes = document.get("scopes_supported")
    revocation = str(document.get("revocation_endpoint", ""))
    return Endpoints(
        token=_endpoint(document, "token_endpoint", where, is_needed=True),
        device=_endpoint(document, "device_authorization_endpoint", where, is_needed=False),
        revocation=revocation if is_safe_for(revocation, issuer) else "",
        scopes=tuple(str(each) for each in scopes) if isinstance(scopes, list) else (),
        secret_in_form=isinstance(methods, list) and "client_secret_post" in methods,
    )


def scope_of(client: OidcClient, endpoints: Endpoints) -> str:
    """What a login asks for."""
    if client.scope:
        return client.scope
    return " ".join(each for each in _SCOPES if each == "openid" or each in endpoints.scopes)


def refreshing(session: Session, endpoints: Endpoints) -> Request:
    """What renews a token (RFC 6749, section 6)."""
    form = {"grant_type": "refresh_token", "refresh_token": session.refresh_token}
    return authenticated(endpoints.token, form, session.client, endpoints)


def revoking(session: Session, endpoints: Endpoints) -> Request | None:
    """What ends a login (RFC 7009, section 2.1); None where the issuer has no endpoint for it."""
    if not endpoints.revocation:
        return None
    form = {"token": session.refresh_token, "token_type_hint": "refresh_token"}
    return authenticated(endpoints.revocation, form, session.client, endpoints)


def authenticated(
    url: str, form: Mapping[str, str], client: OidcClient, endpoints: Endpoints
) -> Request:
    """A form with what says which client sends it (RFC 6749, section 2.3.1)."""
    named = {**form, "client_id": client.client_id}
    if not client.client_secret:
        return Request(url=url, form=named)
    if endpoints.secret_in_form:
        return Request(url=url, form={**named, "client_secret": client.client_secret})
    pair = f"{quote(client.client_id, safe='')}:{quote(client.client_secret, safe='')}"
    basic = base64.b64encode(pair.encode()).decode()
    return Request(url=url, form=named, headers={"Authorization": f"Basic {basic}"})


def tokens_in(answer: Answer) -> Tokens:
    """What the token endpoint gave.

    Raises:
        LoginError: it gave none of them.
    """
    names = ("id_token", "access_token", "refresh_token")
    tokens = Tokens(**{name: _token(answer, name) for name in names})
    if not tokens.id_token and not tokens.access_token:
        raise LoginError("the issuer's answer has neither id_token nor access_token")
    return tokens


def refresh_token_in(answer: Answer) -> str:
    """The one that counts from now on, whatever else is wrong with an answer; empty: as before."""
    try:
        return _token(answer, "refresh_token")
    except LoginError:
        return ""


def _token(answer: Answer, name: str) -> str:
    value = answer.document.get(name)
    if value is None:
        return ""
    # They travel in a header, where nothing else may stand.
    if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
        raise LoginError(f"the issuer gave a {name} that is no text of printable characters")
    if len(value) > _MAX_TOKEN:
        raise LoginError(f"the issuer gave a {name} of {len(value)} letters; allowed: {_MAX_TOKEN}")
    return value


def chosen_token(tokens: Tokens, client: OidcClient) -> str:
    """The token for the controller: the ID token, or else the access token, of the two the first
    that is the issuer's, and for the audience.

    Raises:
        LoginError: neither is.
    """
    seen = []
    named = (("ID", tokens.id_token), ("access", tokens.access_token))
    for name, token in ((name, token) for name, token in named if token):
        claims = claims_in(token)
        if claims is None:
            seen.append(f"the {name} token is no JWT")
            continue
        given = claims.get("aud")
        audiences = given if isinstance(given, list) else [given]
        if claims.get("iss") != client.issuer:
            seen.append(f"the {name} token is of the issuer {shown(claims.get('iss'))!r}")
        elif client.audience and client.audience not in audiences:
            seen.append(f"the {name} token is for {shown(', '.join(map(str, audiences)))!r}")
        elif expiry_of(token) is None:
            seen.append(f"the {name} token does not say when it expires")
        else:
            return token
    wanted = f" for the audience {client.audience!r}" if client.audience else ""
    raise LoginError(f"{client.issuer} gave no token{wanted}: {'; '.join(seen)}")


def claims_in(token: str) -> Mapping[str, Any] | None:
    """The claims of a JWT, not verified; None when it is none."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        text = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        claims = json.loads(text)
    except (binascii.Error, ValueError, RecursionError):
        return None
    return claims if isinstance(claims, dict) else None


def expiry_of(token: str) -> float | None:
    """When a JWT expires, in seconds since 1970; None when it does not say so."""
    expires_s = (claims_in(token) or {}).get("exp")
    if not isinstance(expires_s, int | float) or not abs(expires_s) < _NEVER_S:
        return None
    return float(expires_s)


def expiry_here(token: str, now_s: float) -> float:
    """When a token that has just come expires by this machine's clock, whatever the issuer's
    shows; 0 when it does not say how long it holds."""
    begun_s, expires_s = (claims_in(token) or {}).get("iat"), expiry_of(token)
    if expires_s is None or not isinstance(begun_s, int | float):
        return 0.0
    holds_s = expires_s - begun_s
    return now_s + holds_s if 0.0 < holds_s < _NEVER_S else 0.0


def refusal_in(answer: Answer) -> str:
    """Why an endpoint refuses, for a message: OAuth's `error` and what it says besides."""
    words = [answer.document.get(name) for name in ("error", "error_description")]
    said = ": ".join(shown(each) for each in words if each)
    return said or f"it answered with status {answer.status}"


def shown(value: object) -> str:
    """Something of somebody else's, for a terminal: nothing there may move its cursor."""
    text = "".join(each if each.isprintable() else "?" for each in str(value))
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _endpoint(document: Mapping[str, Any], name: str, where: str, *, is_needed: bool) -> str:
    url, issuer = document.get(name), document["issuer"]
    if url is None and not is_needed:
        return ""
    if url is None:
        raise LoginError(f"{where} has no {name}")
    if not isinstance(url, str) or not is_safe_for(url, issuer):
        raise LoginError(f"{where} has the {name} {shown(url)!r}, which is no https:// URL")
    return url
