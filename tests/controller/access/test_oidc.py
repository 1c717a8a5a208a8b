"""Tokens of an OpenID Connect issuer, which answers on this machine and has real keys."""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm

from controller.access import oidc, tokens
from controller.access.callers import Callers
from controller.access.issuers import Issuer, issuer_of
from controller.access.oidc import Issuers
from controller.access.roles import Caller, Role
from tests.cli.running import outlast
from tests.controller.access.provider import AUDIENCE, KIM, Provider
from tests.e2e.cluster import wait_for


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    monkeypatch.setattr(oidc, "LEAST_REFRESH_S", 0.05)
    made = Provider()
    yield made
    made.close()


@pytest.fixture
def knowing(provider: Provider) -> Iterator[Callable[..., Issuers]]:
    """Makes what knows the provider's issuer, once it has the first keys."""
    made: list[Issuers] = []

    def make(**changes: Any) -> Issuers:
        made.append(Issuers([provider.issuer(**changes)]))
        made[-1].wait()
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_caller_is_known_by_the_newest_token_that_he_has_shown(
    provider: Provider, tmp_path: Path
) -> None:
    """A stream outlives the token it began with, which lasts minutes, once a newer one is shown."""
    path = tmp_path / "tokens.yaml"
    path.write_text(yaml.safe_dump([provider.issuer().document()]))
    now = [datetime.datetime.now(datetime.UTC)]
    callers = Callers(path, now=lambda: now[0])
    token = provider.token()
    began = callers.by_token(token)
    assert began == KIM
    now[0] += datetime.timedelta(hours=2)
    assert callers.by_newer_token(began, token) is None
    renewed = provider.token(exp=now[0].timestamp() + 60, groups=["ml", "ml-admins"])
    assert callers.by_token(renewed) is not None
    known = callers.by_newer_token(began, token)
    assert known == Caller(name=KIM.name, role=Role.ADMIN)
    # One of the file who is called so, or was, is somebody else.
    assert callers.by_newer_token(began, tokens.new_token()[0]) is None
    # Whose issuer is not believed any more has shown nothing.
    path.write_text("[]")
    assert callers.by_newer_token(began, token) is None


def test_a_token_is_of_its_caller_in_the_role_of_the_groups(
    provider: Provider, knowing: Callable[..., Issuers]
) -> None:
    issuers = knowing()
    assert issuers.by_token(provider.token()) == KIM
    admin = issuers.by_token(provider.token(groups=["ml", "ml-admins"]))
    assert admin is not None
    assert admin.role is Role.ADMIN
    # Some issuers have one group as text.
    assert issuers.by_token(provider.token(groups="ml")) == KIM
    assert issuers.by_token(provider.token(aud=["other", AUDIENCE])) == KIM


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "another"},
        {"aud": None},
        {"iss": "https://another.example"},
        {"exp": 1_000_000_000},
        {"exp": None},
        {"nbf": 4_000_000_000},
        {"groups": ["staff"]},
        {"groups": {"ml": True}},
        {"email": "kim lab"},
        {"email": None},
    ],
    ids=lambda claims: "-".join(claims),
)
def test_a_token_that_does_not_hold_is_nobodys(
    provider: Provider, knowing: Callable[..., Issuers], claims: dict[str, Any]
) -> None:
    given = {**jwt.decode(provider.token(), options={"verify_signature": False}), **claims}
    kept = {name: value for name, value in given.items() if value is not None}
    token = jwt.encode(kept, provider.key, algorithm="RS256", headers={"kid": provider.kid})
    assert knowing().by_token(token) is None


def test_a_token_that_the_issuer_has_not_signed_is_nobodys(
    provider: Provider, knowing: Callable[..., Issuers]
) -> None:
    issuers = knowing()
    claims = jwt.decode(provider.token(), options={"verify_signature": False})
    head, body, _ = provider.token().split(".")
    other = rsa.generate_private_key(65537, 2048)
    public = provider.documents["/keys"][1]["keys"][0]["n"]
    named = {"kid": provider.kid}
    for forged in (
        f"{head}.{body}.",
        jwt.encode(claims, None, algorithm="none", headers=named),
        # Signed with what everybody knows.
        jwt.encode(claims, public, algorithm="HS256", headers=named),
        jwt.encode(claims, other, algorithm="RS256", headers=named),
        jwt.encode(claims, ec.generate_private_key(ec.SECP256R1()), "ES256", headers=named),
        provider.token() + "x" * oidc.MAX_TOKEN_BYTES,
        "a.b.c",
        "..",
        "",
    ):
        assert issuers.by_token(forged) is None
    assert issuers.by_token(provider.token()) == KIM


def test_a_new_key_is_asked_for_when_a_token_names_it(
    provider: Provider, knowing: Callable[..., Issuers]
) -> None:
    issuers = knowing()
    before = provider.token()
    provider.take_key("second")
    assert issuers.by_token(before) == KIM
    wait_for(lambda: issuers.by_token(provider.token()) == KIM, "the new key to be known")
    # Withdrawn keys count no more.
    assert issuers.by_token(before) is None


def test_an_issuer_that_is_away_leaves_its_keys_as_they_are(
    provider: Provider, knowing: Callable[..., Issuers], caplog: pytest.LogCaptureFixture
) -> None:
    issuers = knowing()
    keys = provider.documents.pop("/keys")
    assert issuers.by_token(provider.token(headers={"kid": "unknown"})) is None
    wait_for(lambda: "stay as they were" in caplog.text, "the keys to be asked for")
    assert issuers.by_token(provider.token()) == KIM
    provider.documents["/keys"] = keys


@pytest.mark.parametrize(
    "document",
    [
        {"keys": [{"kty": "RSA", "alg": "none", "kid": "x"}]},
        {"keys": [{"kty": "RSA", "kid": ["first"]}]},
        {"keys": [7, None, "x"]},
        "raw",
    ],
)
def test_whatever_an_issuer_answers_it_is_asked_again(
    provider: Provider, knowing: Callable[..., Issuers], document: Any
) -> None:
    issuers = knowing()
    keys = provider.documents["/keys"]
    provider.documents["/keys"] = (200, document)
    assert issuers.by_token(provider.token(headers={"kid": "unknown"})) is None
    provider.documents["/keys"] = keys
    provider.take_key("second")
    wait_for(lambda: issuers.by_token(provider.token()) == KIM, "the new key to be known")


def test_another_role_asks_for_no_keys(provider: Provider, knowing: Callable[..., Issuers]) -> None:
    before = knowing()
    provider.documents.clear()
    after = Issuers([provider.issuer(roles={"ml": Role.OPERATOR})], before)
    found = after.by_token(provider.token())
    assert found is not None
    assert found.role is Role.OPERATOR


def test_names_that_are_anothers_are_refused(
    provider: Provider, knowing: Callable[..., Issuers], caplog: pytest.LogCaptureFixture
) -> None:
    issuers = knowing()
    assert issuers.by_token(provider.token(), {KIM.name}) is None
    assert "who has a token of the file" in caplog.text
    assert issuers.by_token(provider.token(email_verified=False)) is None
    assert issuers.by_token(provider.token(email_verified=True)) == KIM
    assert issuers.by_token(provider.token(email="system.serviceaccount.ci.runner")) is None
    claims = {"groups": ["ml"], "email": KIM.name}
    for changes, why in (
        ({"email": "system.serviceaccount.ci.runner"}, "as service accounts are called"),
        ({"email_verified": "false"}, "has not verified"),
        ({"email": "kim+lab@lab.example"}, "allowed for callers: 1 to 64 letters"),
        ({"groups": ["staff"]}, "its groups give no role"),
    ):
        with pytest.raises(ValueError, match=re.escape(why)):
            provider.issuer().caller({**claims, **changes})


def test_the_thread_of_an_issuer_ends_with_its_entry(
    provider: Provider, knowing: Callable[..., Issuers]
) -> None:
    before = sum(each.name == "oidc" for each in threading.enumerate())
    issuers = knowing()
    # Two audiences of one issuer have one thread.
    both = Issuers([provider.issuer(), provider.issuer(audience="another")], issuers)
    assert both.by_token(provider.token()) == KIM
    assert both.by_token(provider.token(aud="another")) == KIM
    assert sum(each.name == "oidc" for each in threading.enumerate()) == before + 1
    Issuers([], both)
    wait_for(
        lambda: sum(each.name == "oidc" for each in threading.enumerate()) <= before,
        "the thread to end",
    )


def test_an_issuer_that_is_away_at_first_is_asked_again(
    provider: Provider, knowing: Callable[..., Issuers]
) -> None:
    keys = provider.documents.pop("/keys")
    issuers = knowing()
    assert issuers.by_token(provider.token()) is None
    provider.documents["/keys"] = keys
    wait_for(lambda: issuers.by_token(provider.token()) == KIM, "the keys to be known")


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/.well-known/openid-configuration", (200, {"issuer": "https://another.example"})),
        ("/.well-known/openid-configuration", (302, "http://127.0.0.1:1/elsewhere")),
        ("/keys", (200, {"keys": []})),
        ("/keys", (200, {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "first"}]})),
        ("/keys", (200, [1, 2])),
    ],
)
def test_documents_that_are_wrong_give_no_keys(
    provider: Provider, knowing: Callable[..., Issuers], path: str, answer: tuple[int, Any]
) -> None:
    provider.documents[path] = answer
    assert knowing().by_token(provider.token()) is None


def test_keys_that_would_come_over_an_open_line_are_not_taken(
    provider: Provider, knowing: Callable[..., Issuers]
) -> None:
    document = {"issuer": provider.url, "jwks_uri": "http://login.example/keys"}
    provider.documents["/.well-known/openid-configuration"] = (200, document)
    assert knowing().by_token(provider.token()) is None


def test_pods_of_kubernetes_have_tokens_whose_keys_may_be_in_a_file(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    public = json.loads(ECAlgorithm.to_jwk(key.public_key()))
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [public]}))
    account = "system:serviceaccount:ci:runner"
    issuer = Issuer(
        issuer="https://kubernetes.default.svc.cluster.local",
        audience=AUDIENCE,
        role_claim="sub",
        roles={account: Role.SUBMITTER},
        keys=str(tmp_path / "keys.json"),
    )
    claims = {"iss": issuer.issuer, "aud": [AUDIENCE], "sub": account, "exp": time.time() + 600}
    issuers = Issuers([issuer])
    issuers.wait()
    found = issuers.by_token(jwt.encode(claims, key, algorithm="ES256"))
    assert found == Caller(name="system.serviceaccount.ci.runner", role=Role.SUBMITTER)
    issuers.close()


def test_issuers_stand_in_the_file_of_tokens_and_come_with_its_changes(
    provider: Provider, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.yaml"
    mine = outlast("tokens", "add", str(path), "alice", "--role", "admin").stdout.strip()
    callers = Callers(path)
    assert callers.by_token(provider.token()) is None
    document = [*yaml.safe_load(path.read_text()), provider.issuer().document()]
    path.write_text(yaml.safe_dump(document))
    wait_for(lambda: callers.by_token(provider.token()) == KIM, "the issuer to be known")
    # `outlast tokens` leaves it there.
    assert outlast("tokens", "add", str(path), "bob", "--role", "viewer").returncode == 0
    assert callers.by_token(provider.token()) == KIM
    found = callers.by_token(mine)
    assert found is not None
    assert found.name == "alice"
    listed = " ".join(outlast("tokens", "list", str(path)).stdout.split())
    assert f"also tokens of {provider.url} for outlast, called by email; by groups" in listed
    tokens.write(path, tokens.Known(entries=tokens.read(path).entries))
    assert callers.by_token(provider.token()) is None


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"issuer": "http://login.example"}, "issuer is 'http://login.example'; allowed: an https"),
        ({"issuer": 7}, "issuer is 7; allowed: text"),
        ({"audience": ""}, "audience is ''; allowed: text"),
        ({"roles": {}}, "roles is no section"),
        ({"client_id": ""}, "client_id is ''; allowed: text"),
        ({"scope": "openid"}, "scope goes with client_id"),
        ({"roles": {"ml": "root"}}, "roles.ml is 'root'; allowed: viewer"),
        ({"rolls": {}}, "rolls is not known; allowed: issuer, audience"),
    ],
)
def test_what_is_wrong_with_an_issuer_is_said(changes: dict[str, Any], wrong: str) -> None:
    given = {"issuer": "https://login.example", "audience": "a", "roles": {"ml": "viewer"}}
    with pytest.raises(ValueError, match=wrong):
        issuer_of({**given, **changes})
