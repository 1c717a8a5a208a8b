"""HTTP: requests in, answers and streams of events out, a thread per connection."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from tests.kube.fake.errors import ApiError, bad_request
from tests.kube.fake.store import Object

if TYPE_CHECKING:
    from tests.kube.fake.server import FakeKube

_KNOWN_PARAMETERS = frozenset(
    (
        "allowWatchBookmarks",
        "continue",
        "fieldManager",
        "fieldSelector",
        "fieldValidation",
        "gracePeriodSeconds",
        "labelSelector",
        "limit",
        "pretty",
        "propagationPolicy",
        "resourceVersion",
        "resourceVersionMatch",
        "timeoutSeconds",
        "watch",
    )
)


class HttpServer(ThreadingHTTPServer):
    """Listens on a free port of loopback, for one fake."""

    # Connections are broken before their threads are waited for.
    daemon_threads = False

    def __init__(self, kube: FakeKube) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kube = kube
        self.failures: list[BaseException] = []
        """What went wrong here, and not in a request or on its way."""
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._connections_lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._connections_lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def drop_connections(self) -> None:
        """Break all of them; new ones are welcome."""
        with self._connections_lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        # Clients that go away are part of the tests.
        if error is not None and not isinstance(error, OSError):
            self.failures.append(error)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Without it every answer waits for the client's delayed acknowledgement.
    disable_nagle_algorithm = True
    server: HttpServer

    def do_GET(self) -> None:
        self._serve("get", "list")

    def do_POST(self) -> None:
        self._serve("create", "create")

    def do_PUT(self) -> None:
        self._serve("update", "")

    def do_PATCH(self) -> None:
        self._serve("patch", "")

    def do_DELETE(self) -> None:
        self._serve("delete", "deletecollection")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def _serve(self, object_verb: str, collection_verb: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length)
        kube = self.server.kube
        kube.faults.wait_open()
        parts = urlsplit(self.path)
        try:
            user = kube.authenticate(self.headers.get("Authorization"))
            if (document := kube.discover(parts.path)) is not None:
                self._reply(200, document)
                return
            target = kube.target(parts.path)
            verb = object_verb if target.name else collection_verb
            query = _query(parts.query)
            watching = verb in ("list", "get") and query.get("watch") == "true"
            error, is_lost = kube.faults.take("watch" if watching else verb, target.resource.plural)
            if error is not None:
                raise error
            if watching:
                self._send_events(kube.events(user, target, query))
                return
            body = _parse(raw)
            mime = self.headers.get("Content-Type", "").partition(";")[0]
            code, answer = kube.answer(user, verb, target, query, body, mime)
        except ApiError as error:
            self._reply(error.code, error.status(), error.retry_after_s)
            return
        if is_lost:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self._reply(code, answer)

    def _reply(self, code: int, document: Object, retry_after_s: int | None = None) -> None:
        body = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if retry_after_s is not None:
            self.send_header("Retry-After", str(retry_after_s))
        self.end_headers()
        self.wfile.write(body)

    def _send_events(self, events: Iterator[Object]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")


def _query(text: str) -> dict[str, str]:
    query = dict(parse_qsl(text, keep_blank_values=True))
    unknown = sorted(set(query) - _KNOWN_PARAMETERS)
    if unknown:
        raise bad_request(f"the fake does not know the parameters {', '.join(unknown)}")
    query["watch"] = "true" if query.get("watch") in ("true", "True", "1") else ""
    query["allowWatchBookmarks"] = query.get("allowWatchBookmarks", "").lower()
    return query


def _parse(raw: bytes) -> Any:
    if not raw:
        return {}
    try:
        return json.loads(raw)
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
