"""An issuer with device authorization (RFC 8628) whose refresh tokens count once each."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from outlast.oidc.device_code import GRANT_TYPE
from tests.controller.access.provider import AUDIENCE, Provider

CLIENT = "outlast-cli"
USER_CODE = "WDJB-MJHT"
# The error of a token endpoint.
Refusal = dict[str, str]


class DeviceIssuer(Provider):
    """Confirms each code at once, unless `refusals` has something to say first."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.asked: list[dict[str, str]] = []
        """All forms that came."""
        self.refusals: list[tuple[int, Refusal | str]] = []
        """What the next polls get, in place of tokens."""
        self.lives_s: list[float] = []
        """How long the next tokens hold; after that an hour."""
        self.current = ""
        """The refresh token that counts; none does once an old one has come."""
        self.before_refresh: Callable[[], None] = lambda: None
        self.changes: dict[str, Any] = {}
        """Of answers with tokens; None leaves something out."""
        self.code: dict[str, Any] = {
            "user_code": USER_CODE,
            "verification_uri": f"{self.url}/device",
            "verification_uri_complete": f"{self.url}/device?user_code={USER_CODE}",
            "expires_in": 600,
            "interval": 0,
        }
        self.discovery: dict[str, Any] = {
            "issuer": self.url,
            "jwks_uri": f"{self.url}/keys",
            "token_endpoint": f"{self.url}/token",
            "device_authorization_endpoint": f"{self.url}/device-code",
            "revocation_endpoint": f"{self.url}/revoke",
            "scopes_supported": ["openid", "email", "address", "offline_access"],
        }
        self.documents["/.well-known/openid-configuration"] = (200, self.discovery)
        self.endpoints["/device-code"] = self._begin
        self.endpoints["/token"] = self._give
        self.endpoints["/revoke"] = self._take_back

    def forms(self, grant_type: str) -> list[dict[str, str]]:
        """Those for tokens of one kind."""
        return [form for form in self.asked if form.get("grant_type") == grant_type]

    def _begin(self, form: dict[str, str]) -> tuple[int, Any]:
        self.asked.append(form)
        return 200, {"device_code": f"device-{next(self._numbers)}", **self.code}

    def _give(self, form: dict[str, str]) -> tuple[int, Any]:
        self.asked.append(form)
        if form["grant_type"] == GRANT_TYPE:
            assert form["device_code"].startswith("device-")
            if self.refusals:
                return self.refusals.pop(0)
            return 200, self._tokens()
        self.before_refresh()
        with self._lock:
            # One that comes again was stolen, for all that the issuer knows.
            if form["refresh_token"] != self.current:
                self.current = ""
                return 400, {"error": "invalid_grant", "error_description": "Token is not active"}
            return 200, self._tokens()

    def _take_back(self, form: dict[str, str]) -> tuple[int, Any]:
        self.asked.append(form)
        if self.refusals:
            return self.refusals.pop(0)
        with self._lock:
            if form["token"] == self.current:
                self.current = ""
        return 200, ""

    def _tokens(self) -> dict[str, Any]:
        self.current = f"refresh-{next(self._numbers)}"
        life_s = self.lives_s.pop(0) if self.lives_s else 3600.0
        given = {
            "id_token": self.token(exp=time.time() + life_s, aud=AUDIENCE),
            "access_token": "opaque",
            "refresh_token": self.current,
            "token_type": "Bearer",
            **self.changes,
        }
        return {name: value for name, value in given.items() if value is not None}
