"""Who asks by HTTP: a token, in a header or in the cookie that the page's login sets.

The token itself is looked at again by the gRPC services, which the gateway shows it to.
"""

from __future__ import annotations

import time

from starlette.datastructures import Headers
from starlette.requests import Request, cookie_parser
from starlette.responses import JSONResponse, Response

from controller.access.audit import Audit, Entry
from controller.access.callers import UNKNOWN_TOKEN, Callers
from controller.web.gateway import RequestError, calls_as
from controller.web.pages import App, Receive, Scope, Send
from controller.web.parameters import json_body
from controller.web.routes import ROOT
from outlast.channel import HEADER, SCHEME, bearer

COOKIE = "outlast_token"
LOGIN, LOGOUT = f"{ROOT}/login", f"{ROOT}/logout"


class Login:
    """Lets nobody ask the API who has not shown a token, where there are tokens."""

    def __init__(self, app: App, *, callers: Callers, audit: Audit) -> None:
        self._app = app
        self._callers = callers
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header = _shown(Headers(scope=scope))
        wrong = self._wrong(scope, header)
        if wrong is not None:
            answer = JSONResponse(wrong.as_json(), wrong.status)
            await answer(scope, receive, send)
            return
        reset = calls_as.set((header if self._callers.has_tokens else "", _peer(scope)))
        try:
            await self._app(scope, receive, send)
        finally:
            calls_as.reset(reset)

    def _wrong(self, scope: Scope, header: str) -> RequestError | None:
        path = scope["path"]
        if not self._callers.are_asked or not path.startswith(f"{ROOT}/"):
            return None
        if path in (LOGIN, LOGOUT):
            return None
        if not self._callers.has_tokens:
            return RequestError(
                403,
                "page and API take tokens, and this controller knows certificates only: start it "
                "with --tokens-file",
                reason="NO_TOKENS",
            )
        if not header:
            return RequestError(401, "log in with a token first", reason="TOKEN_MISSING")
        if self._callers.by_header(header) is not None:
            return None
        return _refused(self._audit, scope)


class LoginRoutes:
    """Setting the cookie, and taking it away."""

    def __init__(self, callers: Callers, audit: Audit) -> None:
        self._callers = callers
        self._audit = audit

    async def login(self, request: Request) -> Response:
        """Take a token, and have the browser show it from now on."""
        body = await json_body(request)
        token = body.get("token")
        if not isinstance(token, str):
            raise RequestError(400, "token: is missing", fields=(("token", "is missing"),))
        caller = self._callers.by_token(token.strip())
        if caller is None or caller.role is None:
            raise _refused(self._audit, request.scope)
        answer = JSONResponse({"name": caller.name, "role": caller.role.word, "asked": True})
        answer.set_cookie(
            COOKIE,
            token.strip(),
            # Other servers on this host, at other ports, are sent it for this path only.
            path=ROOT,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return answer

    async def logout(self, request: Request) -> Response:
        """Have the browser forget the token."""
        answer = JSONResponse({})
        answer.delete_cookie(COOKIE, path=ROOT, httponly=True, samesite="strict")
        return answer


def _refused(audit: Audit, scope: Scope) -> RequestError:
    """What is answered to a wrong token, which is written down."""
    audit.add(
        Entry(
            at_s=time.time(),
            caller="",
            role="",
            peer=_peer(scope),
            call=f"{scope['method']} {scope['path']}",
            about="",
            outcome="UNAUTHENTICATED",
            why=UNKNOWN_TOKEN,
        )
    )
    return RequestError(401, UNKNOWN_TOKEN, reason="TOKEN_WRONG")


def _shown(headers: Headers) -> str:
    """The header `authorization` of a request, or what it would be of its cookie."""
    given = headers.get(HEADER, "")
    if given.startswith(SCHEME):
        return given
    # As a browser sends them: of others on this host, too, whatever is in those.
    cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
    return bearer(cookie) if cookie else ""


def _peer(scope: Scope) -> str:
    client = scope.get("client")
    return f"http:{client[0]}:{client[1]}" if client else "http:"
