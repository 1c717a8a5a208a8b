"""JSON answers compressed, where the client accepts that.

Starlette's own middleware does it in the event loop, where 10 MB take most of a second in which the
controller hears nobody; and its older versions compress server-sent events, too, which then wait in
the compressor's buffer.
"""

from __future__ import annotations

import gzip
from collections.abc import MutableMapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders

from controller.web.pages import App, Receive, Scope, Send

# Less fits into one packet as it is.
LEAST_BYTES = 1024
# From here on it is done in a thread: the loop waits a millisecond at most.
_BYTES_IN_LOOP = 32_768
# Of numbers, higher levels take several times as long for a few percent.
LEVEL = 4


class Compressed:
    """Answers of `application/json` that come in one piece, unless they are small."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http" or not _accepts_gzip(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        # Held back until the body is known.
        start: MutableMapping[str, Any] | None = None

        async def compressed(message: MutableMapping[str, Any]) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _is_json(message):
                start = message
                return
            if start is not None:
                begun, start = start, None
                message = await _compressed(begun, message)
                await send(begun)
            await send(message)

        await self._app(scope, receive, compressed)


async def _compressed(
    start: MutableMapping[str, Any], message: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """The first message of a body, and the headers of its answer changed to it."""
    headers = MutableHeaders(raw=start["headers"])
    # Caches keep one for each.
    headers.add_vary_header("Accept-Encoding")
    start["headers"] = headers.raw
    body = message.get("body", b"")
    if message.get("more_body", False) or len(body) < LEAST_BYTES:
        return message
    if len(body) > _BYTES_IN_LOOP:
        body = await run_in_threadpool(gzip.compress, body, LEVEL, mtime=0)
    else:
        body = gzip.compress(body, LEVEL, mtime=0)
    headers["Content-Encoding"] = "gzip"
    headers["Content-Length"] = str(len(body))
    return {**message, "body": body}


def _is_json(start: MutableMapping[str, Any]) -> bool:
    headers = Headers(raw=start["headers"])
    media_type = headers.get("content-type", "").partition(";")[0].strip()
    return media_type == "application/json" and "content-encoding" not in headers


def _accepts_gzip(headers: Headers) -> bool:
    """Whether `Accept-Encoding` has gzip, and not with the weight 0 (RFC 9110, 12.5.3)."""
    for each in headers.get("accept-encoding", "").split(","):
        name, _, weight = each.partition(";")
        if name.strip().lower() in ("gzip", "x-gzip", "*"):
            return weight.replace(" ", "").lower() not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
