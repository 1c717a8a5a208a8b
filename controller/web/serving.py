"""An ASGI application on a socket that is bound already, until it is stopped."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from controller.access.tls import ServerTls


class HttpServer:
    """Serves one application in the loop that calls `serve`."""

    def __init__(self, app: Starlette, tls: ServerTls | None) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            # Where somebody asks from goes into the audit log, and is not his own to say.
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        config.load()
        if tls is not None:
            config.ssl = tls.http_context()
        self._server = _Server(config)

    async def serve(self, listening: socket.socket) -> None:
        """Answer until `stop`; the socket is closed then."""
        await self._server.serve(sockets=[listening])

    def stop(self) -> None:
        """Accept nothing any more. May be called by any thread, before `serve` too."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the application's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
