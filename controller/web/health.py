"""The routes that probes ask, of a controller that leads and of one that does not yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from controller.core.health import Answer, Health, liveness, readiness

Look = Callable[[], Awaitable[Health]]


def health_routes(look: Look) -> list[Route]:
    """`/healthz` and `/readyz`, which say of what `look` finds whether it lives, and whether it is
    the one to ask."""
    return [
        Route("/healthz", _route(look, liveness)),
        Route("/readyz", _route(look, readiness)),
    ]


def _route(
    look: Look, decide: Callable[[Health], Answer]
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        decided = decide(await look())
        return JSONResponse(dict(decided.document), 200 if decided.is_ok else 503)

    return answer
