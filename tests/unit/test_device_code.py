"""RFC 8628, step by step: what follows each answer of an issuer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from outlast.oidc import device_code
from outlast.oidc.device_code import DeviceCode, Poll, next_step
from outlast.oidc.device_login import log_in
from outlast.oidc.issuer import (
    Answer,
    Endpoints,
    LoginError,
    OidcClient,
    Tokens,
    claims_in,
    discovery_url,
    endpoints_in,
    expiry_of,
    is_safe,
    scope_of,
)
from tests.controller.access.device_issuer import CLIENT, DeviceIssuer
from tests.controller.access.provider import AUDIENCE

ISSUER = "https://login.example"
POLL = Poll(interval_s=5.0, until_s=600.0)
GIVEN = {
    "device_code": "d",
    "user_code": "WDJB-MJHT",
    "verification_uri": "https://login.example/device",
    "expires_in": 1800,
}


def error(name: str, status: int = 400) -> Answer:
    return Answer(status=status, document={"error": name})


@pytest.mark.parametrize(
    ("answer", "interval_s"),
    [
        (error("authorization_pending"), 5.0),
        # Section 3.5: by 5 seconds, for all that follow.
        (error("slow_down"), 10.0),
        # Section 3.5: an exponential backoff where nobody answers.
        (None, 10.0),
        (error("", 503), 10.0),
        (error("", 429), 10.0),
    ],
)
def test_it_is_asked_again_after_a_pause(answer: Answer | None, interval_s: float) -> None:
    assert next_step(POLL, answer, 100.0) == Poll(interval_s=interval_s, until_s=600.0)


def test_pauses_have_limits() -> None:
    poll = POLL
    for _ in range(9):
        step = next_step(poll, None, 100.0)
        assert isinstance(step, Poll)
        poll = step
    assert poll.interval_s == 60.0
    # One that the issuer made longer is not made shorter.
    slow = Poll(interval_s=300.0, until_s=600.0)
    assert next_step(slow, None, 100.0) == slow
    # The last poll is when the code expires.
    assert slow.pause_s(400.0) == 200.0
    assert Poll(interval_s=0.0, until_s=600.0).pause_s(0.0) == device_code.LEAST_INTERVAL_S


def test_tokens_end_it_even_late() -> None:
    answer = Answer(status=200, document={"id_token": "a.b.c", "refresh_token": "r"})
    assert next_step(POLL, answer, 601.0) == Tokens(id_token="a.b.c", refresh_token="r")


@pytest.mark.parametrize("answer", [error("authorization_pending"), error("slow_down"), None])
def test_nothing_is_waited_for_beyond_the_codes_end(answer: Answer | None) -> None:
    with pytest.raises(LoginError, match="nobody confirmed it in time"):
        next_step(POLL, answer, 600.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device_code": None}, "device_code 'None'; allowed: text"),
        ({"user_code": "\x1b]0;x"}, "user_code '\\?\\]0;x'; allowed: text"),
        ({"verification_uri": "http://login.example"}, "verification_uri 'http://login.example'"),
        ({"verification_uri": "http://127.0.0.1/device"}, "which is no https:// URL"),
        ({"verification_uri": "https://login.example@a.example"}, "which is no https:// URL"),
        ({"verification_uri": "javascript:alert(1)"}, "which is no https:// URL"),
        ({"verification_uri": "https://a.example/\x1b[2J"}, "which is no https:// URL"),
        ({"verification_uri_complete": "ftp://a"}, "verification_uri_complete 'ftp://a'"),
        ({"expires_in": None}, "expires_in 'None'; allowed: a number of seconds"),
        ({"expires_in": "soon"}, "expires_in 'soon'"),
        ({"interval": -1}, "interval '-1'"),
        ({"interval": float("nan")}, "interval 'nan'"),
    ],
)
def test_what_an_issuer_begins_with_is_checked(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(LoginError, match=why):
        device_code.code_in(Answer(status=200, document={**GIVEN, **changes}), ISSUER)


def test_what_an_issuer_leaves_out_is_as_the_rfc_has_it() -> None:
    assert device_code.code_in(Answer(status=200, document=GIVEN), ISSUER) == DeviceCode(
        secret="d",
        user_code="WDJB-MJHT",
        url="https://login.example/device",
        url_with_code="",
        lasts_s=1800.0,
        interval_s=5.0,
    )
    forever = device_code.code_in(
        Answer(status=200, document={**GIVEN, "expires_in": 1e12}), ISSUER
    )
    assert forever.lasts_s == 3600.0
    with pytest.raises(LoginError, match="begins no login: unauthorized_client"):
        device_code.code_in(error("unauthorized_client"), ISSUER)


def test_scopes_are_those_that_the_issuer_has() -> None:
    client = OidcClient(issuer="https://a.example", client_id="a")
    endpoints = Endpoints(token="t", device="d")
    assert scope_of(client, endpoints) == "openid"
    known = Endpoints(token="t", device="d", scopes=("offline_access", "phone", "email"))
    assert scope_of(client, known) == "openid email offline_access"
    given = OidcClient(issuer="https://a.example", client_id="a", scope="openid groups")
    assert scope_of(given, known) == "openid groups"


def test_whatever_a_token_has_nothing_breaks() -> None:
    for token in ("", "a.b", "..", "a.%%%.c", "a.W10.c", "a.bnVsbA.c", "a.ew.c"):
        assert claims_in(token) is None
        assert expiry_of(token) is None
    # {"exp": null}, {"exp": "1"}, {"exp": NaN} and {"exp": 1e999}.
    for body in ("eyJleHAiOm51bGx9", "eyJleHAiOiIxIn0", "eyJleHAiOk5hTn0", "eyJleHAiOjFlOTk5fQ"):
        assert claims_in(f"a.{body}.c") is not None
        assert expiry_of(f"a.{body}.c") is None


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("https://login.example/x", True),
        ("http://127.0.0.1:8080", True),
        ("http://[::1]:8080", True),
        ("http://localhost", True),
        ("http://localhost.example", False),
        ("http://login.example", False),
        ("https://", False),
        ("https://[", False),
        ("file:///etc/passwd", False),
        ("https://login.example@a.example/", False),
        ("https://@a.example/", False),
        ("https://a.example\\.login.example/", False),
        ("https://a.example/\x1b[2J", False),
        ("https://l\u043egin.example/", False),
        ("https://a.example:port/", False),
        ("https://:443/", False),
    ],
)
def test_only_urls_that_nobody_on_the_way_can_change_are_safe(url: str, safe: bool) -> None:
    assert is_safe(url) is safe


@pytest.mark.parametrize(
    "issuer",
    [
        "https://a.example/\x1b]0;x\x07",
        "https://a.example/\n",
        "https://a.example?x=",
        "https://a.example#",
        "https://kim@a.example",
    ],
)
def test_an_issuer_is_a_url_that_a_terminal_can_show(issuer: str) -> None:
    with pytest.raises(LoginError, match="without a user, a query or a fragment") as refused:
        discovery_url(issuer)
    assert str(refused.value).isprintable()


def test_an_issuer_elsewhere_has_no_endpoints_on_this_machine() -> None:
    document = {"issuer": ISSUER, "token_endpoint": "http://127.0.0.1:8080/token"}
    with pytest.raises(LoginError, match=r"token_endpoint 'http://127.0.0.1:8080/token', which is"):
        endpoints_in(document, ISSUER)


@pytest.fixture
def issuer() -> Iterator[DeviceIssuer]:
    made = DeviceIssuer()
    yield made
    made.close()


def test_a_login_keeps_to_the_pauses_of_its_issuer(issuer: DeviceIssuer) -> None:
    issuer.code["interval"] = 7
    slow_down = (400, {"error": "slow_down"})
    issuer.refusals = [(400, {"error": "authorization_pending"}), slow_down, slow_down, (502, "")]
    slept: list[float] = []
    shown: list[DeviceCode] = []
    client = OidcClient(issuer=issuer.url, client_id=CLIENT, audience=AUDIENCE)
    token, session = log_in(client, shown.append, now_s=lambda: sum(slept), sleep=slept.append)
    assert slept == [7.0, 7.0, 12.0, 17.0, 34.0]
    assert [each.user_code for each in shown] == [issuer.code["user_code"]]
    assert (session.client, session.refresh_token) == (client, issuer.current)
    assert (expiry_of(token) or 0.0) > time.time()


def test_polls_end_when_the_code_does(issuer: DeviceIssuer) -> None:
    issuer.code["interval"] = 400
    issuer.refusals = [(400, {"error": "authorization_pending"})] * 9
    slept: list[float] = []
    client = OidcClient(issuer=issuer.url, client_id=CLIENT)
    with pytest.raises(LoginError, match="nobody confirmed it in time"):
        log_in(client, lambda code: None, now_s=lambda: sum(slept), sleep=slept.append)
    assert slept == [400.0, 200.0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"issuer": "https://another.example"}, "has the issuer 'https://another.example', not"),
        ({"issuer": None}, "has the issuer 'None', not"),
        ({"token_endpoint": None}, "has no token_endpoint"),
        ({"token_endpoint": "http://login.example/t"}, "which is no https:// URL"),
        ({"token_endpoint": 7}, "has the token_endpoint '7', which is no https:// URL"),
        ({"device_authorization_endpoint": None}, "cannot log in a program without a browser"),
        ({"device_authorization_endpoint": "file:///etc/passwd"}, "which is no https:// URL"),
    ],
)
def test_a_discovery_document_that_is_wrong_is_named(
    issuer: DeviceIssuer, changes: dict[str, Any], why: str
) -> None:
    for name, value in changes.items():
        if value is None:
            issuer.discovery.pop(name)
        else:
            issuer.discovery[name] = value
    client = OidcClient(issuer=issuer.url, client_id=CLIENT)
    with pytest.raises(LoginError, match=why):
        log_in(client, lambda code: None)
    assert issuer.asked == []


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((404, {}), "there is no OpenID Connect issuer at"),
        ((200, ["issuer"]), "answered with what is no JSON object"),
        # Nobody is followed elsewhere.
        ((302, "http://127.0.0.1:1/elsewhere"), "answered with status 302"),
    ],
)
def test_a_document_that_is_none_is_named(
    issuer: DeviceIssuer, answer: tuple[int, Any], why: str
) -> None:
    issuer.documents["/.well-known/openid-configuration"] = answer
    with pytest.raises(LoginError, match=why):
        log_in(OidcClient(issuer=issuer.url, client_id=CLIENT), lambda code: None)
