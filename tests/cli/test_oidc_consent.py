"""What a controller names of an issuer is used once a person agreed, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from outlast.access import logins_file
from outlast.cli import login
from outlast.cli.errors import ExitCode
from outlast.v1.access_pb2 import WhoAmIResponse
from tests.cli.running import Done
from tests.cli.test_oidc_login import Place, entry, place, trusting
from tests.controller.access.device_issuer import CLIENT
from tests.controller.access.provider import AUDIENCE, KIM

__all__ = ["place", "trusting"]  # fixtures


def words(done: Done) -> str:
    return " ".join(done.stderr.split())


def test_what_the_controller_names_is_shown_and_asked_about(place: Place) -> None:
    done = place.login(says="")
    assert done.returncode == ExitCode.BAD_INPUT
    assert f"issuer {place.issuer.url} client id {CLIENT} audience {AUDIENCE}" in words(done)
    assert "scopes openid, and the usual ones that the issuer has" in words(done)
    assert "can use the token wherever else it is taken. Log in there? [y/N]" in words(done)
    assert "not logged in: nothing was changed" in words(done)
    assert place.issuer.asked == []
    assert not logins_file(place.environment).exists()


def test_without_a_terminal_it_is_refused_at_once(place: Place) -> None:
    done = place.outlast("login", place.grpc)
    assert done.returncode == ExitCode.BAD_INPUT
    assert " ".join((*place.named, "--oidc-audience", AUDIENCE)) in words(done)
    assert "Have a token? Use --token-file -" in words(done)
    assert place.issuer.asked == []


def test_what_a_person_named_or_agreed_to_is_not_asked_about(place: Place) -> None:
    given = (*place.named, "--oidc-audience", AUDIENCE)
    done = place.outlast("login", place.grpc, "--name", "lab", *given)
    assert done.returncode == 0, done.stderr
    assert "[y/N]" not in done.stderr
    assert f"issuer {place.issuer.url} client id {CLIENT} audience {AUDIENCE}" in words(done)
    again = place.outlast("login", "lab")
    assert again.returncode == 0, again.stderr
    assert "[y/N]" not in again.stderr


def test_an_audience_of_the_controllers_is_not_taken_unasked(place: Place) -> None:
    """It could be another service's, for which the same client gets tokens."""
    done = place.outlast("login", place.grpc, *place.named)
    assert done.returncode == 0, done.stderr
    assert "audience" not in place.issuer.asked[0]


def test_an_issuer_of_the_controllers_cannot_move_the_cursor(place: Place) -> None:
    place.tokens_file.write_text(
        yaml.safe_dump([{**entry(place.issuer), "client_id": "a\x1b[2Jb"}])
    )
    done = place.login(says="n")
    assert done.returncode == ExitCode.BAD_INPUT
    assert "client id a?[2Jb" in words(done)
    assert "\x1b" not in done.stderr
    given = ("--oidc-issuer", "https://a.example/\x1b[2J", "--oidc-client-id", "a")
    done = place.login(*given)
    assert "the issuer is 'https://a.example/?[2J'" in words(done)
    assert "\x1b" not in done.stderr


def test_a_certificate_that_is_enough_ends_no_session(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.login().returncode == 0
    before = place.kept["lab"]["oidc"]["id"]
    me = WhoAmIResponse(name=KIM.name, role="submitter", asked=True)
    monkeypatch.setattr(login, "_me", lambda address, access: me)
    for given in (("lab",), (place.grpc, "--name", "lab")):
        assert place.outlast("login", *given).returncode == 0
        assert place.kept["lab"]["oidc"]["id"] != before
        assert place.kept["lab"]["oidc"]["client_id"] == CLIENT
        before = place.kept["lab"]["oidc"]["id"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (True, "the controller names no issuer; say which with --oidc-issuer URL"),
        (False, "the controller asks nobody who he is; leave out the --oidc options"),
    ],
)
def test_options_of_an_issuer_are_never_ignored(
    place: Place, monkeypatch: pytest.MonkeyPatch, asked: bool, why: str
) -> None:
    me = WhoAmIResponse(name=KIM.name, role="submitter", asked=asked)
    monkeypatch.setattr(login, "_me", lambda address, access: me)
    done = place.login("--oidc-client-id", CLIENT)
    assert done.returncode == ExitCode.BAD_INPUT
    assert why in words(done)


def test_another_client_is_not_sent_the_secret_of_the_one_before(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("s3cret")
    place.issuer.discovery["token_endpoint_auth_methods_supported"] = ["client_secret_post"]
    given = (*place.named, "--oidc-client-secret-file", str(tmp_path / "secret"))
    assert place.login(*given).returncode == 0
    assert place.kept["lab"]["oidc"]["client_secret"] == "s3cret"
    place.issuer.asked.clear()
    assert place.outlast("login", "lab", "--oidc-client-id", "new").returncode == 0
    assert {form["client_id"] for form in place.issuer.asked} == {"new"}
    assert not any("client_secret" in form for form in place.issuer.asked)
    assert "client_secret" not in place.kept["lab"]["oidc"]
