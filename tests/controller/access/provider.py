"""An OpenID Connect issuer on this machine, with real keys."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from controller.access.issuers import Issuer
from controller.access.roles import Caller, Role

AUDIENCE = "outlast"
ROLES = {"ml": Role.SUBMITTER, "ml-admins": Role.ADMIN}
KIM = Caller(name="kim@lab.example", role=Role.SUBMITTER)


# Status and document for a form.
Endpoint = Callable[[dict[str, str]], tuple[int, Any]]


class Provider:
    """An issuer: its documents and what answers forms, by path, and the key that it signs with."""

    def __init__(self) -> None:
        documents: dict[str, tuple[int, Any]] = {}
        endpoints: dict[str, Endpoint] = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(*documents.get(self.path, (404, {})))

            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = dict(parse_qsl(text, keep_blank_values=True))
                if basic := self.headers.get("Authorization"):
                    form["Authorization"] = basic
                self.answer(*endpoints.get(self.path, lambda form: (404, {}))(form))

            def answer(self, status: int, document: Any) -> None:
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", document)
                self.end_headers()
                self.wfile.write(json.dumps(document).encode())

            def log_message(self, *given: Any) -> None:
                """Tests do not show requests."""

        self.documents = documents
        self.endpoints = endpoints
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        # Looks twenty times a second whether it is to end.
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.documents["/.well-known/openid-configuration"] = (
            200,
            {"issuer": self.url, "jwks_uri": f"{self.url}/keys"},
        )
        self.take_key("first")

    def take_key(self, kid: str) -> None:
        """Sign with another one from now on."""
        self.kid, self.key = kid, rsa.generate_private_key(65537, 2048)
        public = json.loads(RSAAlgorithm.to_jwk(self.key.public_key()))
        self.documents["/keys"] = (200, {"keys": [{**public, "kid": kid, "use": "sig"}]})

    def token(self, headers: dict[str, str] | None = None, **claims: Any) -> str:
        """For an hour, unless said otherwise."""
        named = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "u-17",
            "email": KIM.name,
            "groups": ["staff", "ml"],
            "exp": time.time() + 3600,
        }
        return jwt.encode(
            {**named, **claims}, self.key, algorithm="RS256", headers=headers or {"kid": self.kid}
        )

    def issuer(self, **changes: Any) -> Issuer:
        given = {"issuer": self.url, "audience": AUDIENCE, "name": "email", "roles": ROLES}
        return Issuer(**{**given, **changes})

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
