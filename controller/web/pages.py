"""The files of the page, and what keeps other web sites out of it and of the API."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from controller.web.gateway import RequestError
from controller.web.routes import ROOT

FOLDER = Path(__file__).with_name("page")
# Nothing of the page comes from elsewhere, and no script is in its HTML.
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)

# They show no more than counts and names, and change nothing.
FOR_ALL = ("/healthz", "/readyz", "/metrics", "/sd/agents")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def page_file(request: Request) -> Response:
    """A file of the page."""
    name = request.path_params["name"]
    path = (FOLDER / name).resolve()
    if not path.is_relative_to(FOLDER) or not path.is_file():
        return JSONResponse(RequestError(404, f"there is no file {name!r}").as_json(), 404)
    return FileResponse(path, headers={"Cache-Control": "no-cache"})


async def index(request: Request) -> Response:
    """The page, whose own script reads the path."""
    if request.url.path.startswith("/api/"):
        wrong = f"there is no {request.url.path}; {ROOT}/openapi.json lists what there is"
        return JSONResponse(RequestError(404, wrong, reason="NOT_FOUND").as_json(), 404)
    return FileResponse(FOLDER / "index.html", headers={"Cache-Control": "no-cache"})


class SameSite:
    """Lets nobody in whom another web site in the same browser has sent, and adds headers.

    A browser sends a JSON body to another site only after having asked it, which is not answered;
    and says from which site it comes. A site that has its own name resolve to the loopback is
    told by that name.

    Without an encrypted login page and API answer this machine only, unless they are open: what
    Prometheus and probes ask for stays for all.
    """

    def __init__(self, app: App, *, is_open: bool) -> None:
        self._app = app
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Content-Security-Policy"] = POLICY
            await send(message)

        wrong = _wrong(scope, is_open=self._is_open)
        if wrong is None:
            await self._app(scope, receive, with_headers)
        else:
            answer = JSONResponse(wrong.as_json(), wrong.status)
            await answer(scope, receive, with_headers)


def _wrong(scope: Scope, *, is_open: bool) -> RequestError | None:
    headers = Headers(scope=scope)
    host, server = headers.get("host", ""), scope.get("server")
    is_here = server is not None and _is_loopback(server[0])
    if scope["path"] in FOR_ALL:
        return None
    if not is_here and not is_open:
        return RequestError(
            403,
            "page and API answer the controller's own machine only, because nobody has to log in: "
            "forward the port (ssh -L, kubectl port-forward), or start the controller with "
            "--tls-dir and --tokens-file",
            reason="NOT_OPEN",
        )
    if is_here and not _is_loopback(_name(host)):
        return RequestError(
            400,
            f"Host is {host!r}; allowed on the loopback: localhost or its addresses",
            reason="WRONG_HOST",
        )
    if scope["method"] in ("GET", "HEAD"):
        return None
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return RequestError(403, f"a page of {origin} may not do this", reason="CROSS_SITE")
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return RequestError(415, "Content-Type has to be application/json", reason="NOT_JSON")
    return None


def _name(host: str) -> str:
    """Without the port, and without the brackets of an address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(name: str) -> bool:
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
