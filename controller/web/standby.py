"""The HTTP port of a controller that does not lead yet: probes and metrics, and nothing else.

It is served by a thread with a loop of its own. The controller's loop is held while its database
does not answer, and while it reads a large journal; a probe that is not answered for as long would
have the process killed in the middle of a takeover.

The socket goes on listening between this server and the full one, so that who connects then waits
for an answer and is not refused. A connection on which nothing was asked yet may be closed at that
moment. Nobody has to log in: behind this server is nothing that needs a token.
"""

from __future__ import annotations

import asyncio
import socket
import threading

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from controller.access.tls import ServerTls
from controller.core.health import Health, Phase
from controller.web.exposition import expose
from controller.web.gateway import RequestError
from controller.web.health import health_routes
from controller.web.metrics import itself
from controller.web.pages import SameSite
from controller.web.serving import HttpServer

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Standby:
    """Answers from now on until `close`."""

    def __init__(self, listening: socket.socket, *, tls: ServerTls | None, is_open: bool) -> None:
        """`is_open`: answer requests of other machines, too (`--open-http`)."""
        # One whole value, which the thread reads and the controller's loop replaces.
        self._health = Health(phase=Phase.STARTS, why="it begins")
        app = Starlette(
            routes=[
                *health_routes(self._look),
                Route("/metrics", _metrics),
                Route("/{path:path}", self._refuse, methods=_METHODS),
            ],
            middleware=[Middleware(SameSite, is_open=is_open)],
        )
        self._server = HttpServer(app, tls)
        # The server closes what it is given; the port stays with the caller's own descriptor.
        port = listening.dup()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve(port)), name="standby-http", daemon=True
        )
        self._thread.start()

    def waits_for(self, whom: str) -> None:
        """Another controller leads."""
        self._health = Health(phase=Phase.WAITS, why=whom)

    def takes_over(self) -> None:
        """It will lead once it has read the journal."""
        self._health = Health(phase=Phase.STARTS, why="it reads the journal")

    def close(self) -> None:
        """Answer nothing any more; blocks for some tenths of a second, the first time."""
        self._server.stop()
        self._thread.join()

    async def _look(self) -> Health:
        return self._health

    async def _refuse(self, request: Request) -> Response:
        refusal = RequestError(
            503,
            f"this controller does not lead ({self._health.phase}: {self._health.why}); ask the "
            "one that does",
            reason="NOT_LEADING",
        )
        return JSONResponse(refusal.as_json(), refusal.status)


async def _metrics(request: Request) -> Response:
    return await expose(request, itself.collect_standby())
