"""The OAuth 2.0 Device Authorization Grant (RFC 8628): what to do next. Pure.

A program gets a code, which a person confirms in any browser; meanwhile the program polls. Each
answer gives the next wait, or the tokens, or the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outlast.oidc.issuer import (
    Answer,
    Endpoints,
    LoginError,
    OidcClient,
    Request,
    Tokens,
    authenticated,
    is_safe_for,
    refusal_in,
    scope_of,
    shown,
    tokens_in,
)

GRANT_TYPE = "urn:ietf:params:oauth:grant-type:device_code"
# Section 3.2: where the issuer does not say how long.
_INTERVAL_S = 5.0
# Whatever an issuer says, it is not asked more often.
LEAST_INTERVAL_S = 0.1
# Section 3.5: `slow_down` adds so much, for all polls that follow.
_SLOW_DOWN_S = 5.0
# To which the pause doubles while an issuer does not answer.
_MOST_INTERVAL_S = 60.0
# Nobody waits longer for a browser, whatever an issuer says of its code.
_LONGEST_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCode:
    """What an issuer gave for one login."""

    secret: str
    """By which the program asks; the person does not see it."""
    user_code: str
    url: str
    url_with_code: str
    """Empty: the person types the code."""
    lasts_s: float
    interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """How polling goes on."""

    interval_s: float
    until_s: float

    def pause_s(self, now_s: float) -> float:
        """Before the next poll; the last one is when the code expires."""
        return max(LEAST_INTERVAL_S, min(self.interval_s, self.until_s - now_s))


def asking_for_code(client: OidcClient, endpoints: Endpoints) -> Request:
    """What begins a login.

    Raises:
        LoginError: the issuer has no such logins.
    """
    if not endpoints.device:
        raise LoginError(
            f"{client.issuer} has no device_authorization_endpoint in its discovery document: it "
            "cannot log in a program without a browser; give a token of it with --token-file"
        )
    form = {"scope": scope_of(client, endpoints)}
    if client.audience not in ("", client.client_id):
        # Of Auth0 and others, for an access token with that audience; issuers without it ignore it.
        form["audience"] = client.audience
    return authenticated(endpoints.device, form, client, endpoints)


def code_in(answer: Answer, issuer: str) -> DeviceCode:
    """What the issuer answered to that.

    Raises:
        LoginError: it refuses, or what it gave cannot be used.
    """
    document = answer.document
    if answer.status != 200:
        raise LoginError(f"the issuer begins no login: {refusal_in(answer)}")
    with_code = ""
    if document.get("verification_uri_complete"):
        with_code = _url(document, "verification_uri_complete", issuer)
    return DeviceCode(
        secret=_text(document, "device_code"),
        user_code=_text(document, "user_code"),
        url=_url(document, "verification_uri", issuer),
        url_with_code=with_code,
        lasts_s=min(_seconds(document, "expires_in", None), _LONGEST_S),
        interval_s=_seconds(document, "interval", _INTERVAL_S),
    )


def asking_for_tokens(code: DeviceCode, client: OidcClient, endpoints: Endpoints) -> Request:
    """One poll."""
    form = {"grant_type": GRANT_TYPE, "device_code": code.secret}
    return authenticated(endpoints.token, form, client, endpoints)


def begun(code: DeviceCode, now_s: float) -> Poll:
    """Before the first poll."""
    return Poll(interval_s=code.interval_s, until_s=now_s + code.lasts_s)


def next_step(poll: Poll, answer: Answer | None, now_s: float) -> Poll | Tokens:
    """What follows an answer; None is for none at all.

    Raises:
        LoginError: the login is over, without tokens.
    """
    if answer is not None and answer.status == 200:
        return tokens_in(answer)
    after = _after(poll, answer)
    if now_s >= poll.until_s:
        raise LoginError(_expired("nobody confirmed it in time"))
    return after


def _after(poll: Poll, answer: Answer | None) -> Poll:
    if answer is None or answer.is_busy:
        doubled_s = min(max(2 * poll.interval_s, 1.0), _MOST_INTERVAL_S)
        return replace(poll, interval_s=max(doubled_s, poll.interval_s))
    match answer.document.get("error"):
        case "authorization_pending":
            return poll
        case "slow_down":
            return replace(poll, interval_s=poll.interval_s + _SLOW_DOWN_S)
        case "access_denied":
            raise LoginError("the login was denied at the issuer: nothing was changed here")
        case "expired_token":
            raise LoginError(_expired("the issuer does not take it any more"))
        case _:
            raise LoginError(f"the issuer ended the login: {refusal_in(answer)}")


def _expired(why: str) -> str:
    return f"the code has expired ({why}); run `outlast login` again for a new one"


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not value or shown(value) != value:
        raise LoginError(f"the issuer's answer has the {name} {shown(value)!r}; allowed: text")
    return value


def _url(document: Mapping[str, Any], name: str, issuer: str) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not is_safe_for(value, issuer):
        raise LoginError(
            f"the issuer's answer has the {name} {shown(value)!r}, which is no https:// URL"
        )
    return value


def _seconds(document: Mapping[str, Any], name: str, default: float | None) -> float:
    value = document.get(name, default)
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not 0.0 <= found < math.inf:
        raise LoginError(
            f"the issuer's answer has the {name} {shown(value)!r}; allowed: a number of seconds"
        )
    return found
