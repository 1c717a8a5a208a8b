"""The controller's HTTP end: page, API, health and metrics, in the same event loop."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import outlast
from controller.access.audit import Audit
from controller.access.callers import Callers
from controller.access.tls import ServerTls
from controller.core.health import Health, Phase
from controller.planner import PlanJob
from controller.refusals import ReadOnlyError
from controller.service import Service
from controller.sessions.session import Sessions
from controller.store.journal import Journal
from controller.web.api import Api
from controller.web.compression import Compressed
from controller.web.exposition import expose
from controller.web.gateway import Gateway
from controller.web.health import health_routes
from controller.web.login import Login, LoginRoutes
from controller.web.metrics import ControllerMetrics
from controller.web.pages import SameSite, index, page_file
from controller.web.serving import HttpServer
from outlast.errors import OutlastError

# A loop that takes longer for one turn does not do its work.
ALIVE_WITHIN_S = 2.0
# A probe is a commit; whoever asks in between is answered by the one before.
PROBE_PERIOD_S = 10.0


class Web:
    """Serves HTTP until stopped."""

    def __init__(
        self,
        service: Service,
        journal: Journal,
        sessions: Sessions,
        metrics: ControllerMetrics,
        callers: Callers,
        audit: Audit,
        *,
        tls: ServerTls | None = None,
        plan_job: PlanJob | None = None,
        is_open: bool = False,
    ) -> None:
        """`is_open`: the page answers others than this machine, too."""
        self._tls = tls
        self._service = service
        self._journal = journal
        self._sessions = sessions
        self._metrics = metrics
        self._server: HttpServer | None = None
        self._probed_s = -math.inf
        self._gateway = Gateway()
        self._api = Api(self._gateway, self._about, LoginRoutes(callers, audit), plan_job)
        self.app = Starlette(
            routes=[
                *health_routes(self._look),
                Route("/metrics", self._show_metrics),
                Route("/sd/agents", self._agents),
                *self._api.routes(),
                Route("/page/{name:path}", page_file),
                Route("/{path:path}", index),
            ],
            middleware=[
                Middleware(Compressed),
                Middleware(SameSite, is_open=is_open),
                Middleware(Login, callers=callers, audit=audit),
            ],
        )

    async def serve(self, listening: socket.socket, grpc: str) -> None:
        """Answer on a bound socket until `stop`; `grpc` is where this process reaches services."""
        self._gateway.connect(grpc)
        self._server = HttpServer(self.app, self._tls)
        try:
            await self._server.serve(listening)
        finally:
            await self._gateway.close()

    def stop(self) -> None:
        """Answer nothing any more, and end what streams."""
        self._api.streams.stop()
        if self._server is not None:
            self._server.stop()

    def _about(self) -> dict[str, Any]:
        return {
            "version": outlast.__version__,
            "term": self._service.term,
            "read_only": self._service.read_only,
        }

    async def _look(self) -> Health:
        """As it is now: the loop has to turn, and the journal to be writable unless its disk is
        full."""
        failure = ""
        if not self._service.read_only:
            try:
                async with asyncio.timeout(ALIVE_WITHIN_S):
                    await self._service.tell()
                self._probe(asyncio.get_running_loop().time())
            except ReadOnlyError:
                # It has become so just now.
                pass
            except (TimeoutError, OutlastError) as error:
                failure = str(error) or f"the loop did not turn within {ALIVE_WITHIN_S:.0f} s"
        is_leaving = self._service.is_leaving
        return Health(
            phase=Phase.STOPS if is_leaving else Phase.LEADS,
            why="it was asked to" if is_leaving else "",
            term=self._service.term,
            read_only=self._service.read_only,
            failure=failure,
        )

    def _probe(self, now_s: float) -> None:
        """See whether the journal can be written, unless that was so a moment ago."""
        if now_s < self._probed_s + PROBE_PERIOD_S:
            return
        self._journal.probe()
        self._probed_s = now_s

    async def _agents(self, request: Request) -> Response:
        """Prometheus HTTP service discovery: the agents that are connected now.

        An agent's own series say nothing of its node; the target's label does.
        """
        addresses = self._sessions.metrics_addresses()
        return JSONResponse(
            [
                {"targets": [address], "labels": {"node": node}}
                for node, address in addresses.items()
            ]
        )

    async def _show_metrics(self, request: Request) -> Response:
        return await expose(request, self._metrics.collect())
