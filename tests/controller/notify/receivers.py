"""Local receivers: an HTTP server that keeps what it is sent, and answers as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class HttpReceiver:
    """What came, and what is answered."""

    url: str = ""
    status: int = 200
    answer: bytes = b"ok"
    headers: dict[str, str] = field(default_factory=dict)
    got: list[tuple[Message, bytes]] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)
    """While it is cleared, nothing is answered."""

    def __post_init__(self) -> None:
        self.answers.set()


@contextmanager
def http_receiver() -> Iterator[HttpReceiver]:
    """One that listens on a free port."""
    it = HttpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            it.got.append((self.headers, body))
            it.answers.wait()
            self.send_response(it.status)
            for name, value in it.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(it.answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    it.url = f"http://127.0.0.1:{server.server_address[1]}/hook/hunter2"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield it
    finally:
        it.answers.set()
        server.shutdown()
        server.server_close()
        thread.join()
