"""`outlast logout` of a login that an issuer gave: it ends there, too."""

from __future__ import annotations

import pytest

from tests.cli.test_oidc_login import Place, place, trusting
from tests.controller.access.device_issuer import CLIENT

__all__ = ["place", "trusting"]


def test_logout_ends_the_login_at_its_issuer(place: Place) -> None:
    assert place.login().returncode == 0
    refresh_token = place.issuer.current
    done = place.outlast("logout")
    assert done.stdout == f"lab: forgotten, and ended at {place.issuer.url}\n"
    assert place.issuer.asked[-1] == {
        "token": refresh_token,
        "token_type_hint": "refresh_token",
        "client_id": CLIENT,
    }
    assert place.issuer.current == ""
    assert place.kept == {}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"revocation_endpoint": None}, "it has no endpoint for that (revocation_endpoint)"),
        ({"revocation_endpoint": "http://127.0.0.1:1/"}, "http://127.0.0.1:1/ does not answer"),
        ({}, "unsupported_token_type: no"),
    ],
)
def test_a_login_that_goes_on_at_its_issuer_is_forgotten_and_told(
    place: Place, change: dict[str, str | None], why: str
) -> None:
    assert place.login().returncode == 0
    place.issuer.discovery.update(change)
    if not change:
        said = {"error": "unsupported_token_type", "error_description": "no"}
        place.issuer.refusals = [(400, said)]
    done = place.outlast("logout")
    assert done.returncode == 0
    assert f"lab: forgotten; at {place.issuer.url} the login goes on, as {why}" in done.stdout
    assert place.kept == {}


def test_a_login_that_cannot_be_renewed_has_nothing_to_end(place: Place) -> None:
    place.issuer.changes = {"refresh_token": None}
    assert place.login().returncode == 0
    assert "as it gave no refresh token" in place.outlast("logout").stdout
