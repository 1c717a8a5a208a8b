"""The controller's HTTP end: page, API, health and metrics, in the same event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import outlast
from controller.access.audit import Audit
from controller.access.callers import Callers
from controller.access.tls import ServerTls
from controller.planner import PlanJob
from controller.refusals import ReadOnlyError
from controller.service import Service
from controller.sessions.session import Sessions
from controller.store.journal import Journal
from controller.web.api import Api
from controller.web.compression import Compressed
from controller.web.gateway import Gateway
from controller.web.login import Login, LoginRoutes
from controller.web.metrics import ControllerMetrics
from controller.web.pages import SameSite, index, page_file
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
        self._server: _Server | None = None
        self._probed_s = -math.inf
        self._gateway = Gateway()
        self._api = Api(self._gateway, self._about, LoginRoutes(callers, audit), plan_job)
        self.app = Starlette(
            routes=[
                Route("/healthz", self._healthz),
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
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            # Where somebody asks from goes into the audit log, and is not his own to say.
            proxy_headers=False,
            timeout_graceful_shutdown=1,
        )
        config.load()
        if self._tls is not None:
            config.ssl = self._tls.http_context()
        self._server = _Server(config)
        try:
            await self._server.serve(sockets=[listening])
        finally:
            await self._gateway.close()

    def stop(self) -> None:
        """Answer nothing any more, and end what streams."""
        self._api.streams.stop()
        if self._server is not None:
            self._server.should_exit = True

    def _about(self) -> dict[str, Any]:
        return {
            "version": outlast.__version__,
            "term": self._service.term,
            "read_only": self._service.read_only,
        }

    async def _healthz(self, request: Request) -> Response:
        """200 only when the loop turns and the journal can be written, or its disk is full.

        A new process would not find more room, and agents would lose the one that they have.
        """
        if self._service.read_only:
            return JSONResponse({"ok": True, "read_only": self._service.read_only})
        try:
            async with asyncio.timeout(ALIVE_WITHIN_S):
                await self._service.tell()
            self._probe(asyncio.get_running_loop().time())
        except ReadOnlyError:
            return JSONResponse({"ok": True, "read_only": self._service.read_only})
        except (TimeoutError, OutlastError) as error:
            reason = str(error) or f"the loop did not turn within {ALIVE_WITHIN_S:.0f} s"
            return JSONResponse({"ok": False, "reason": reason}, status_code=503)
        return JSONResponse({"ok": True, "term": self._service.term})

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
        # The state is read here, between two turns of the loop. Writing a large fleet down
        # takes many times as long, so that is done beside it.
        taken = _Taken(list(self._metrics.collect()))
        if "application/openmetrics-text" in request.headers.get("accept", ""):
            text = await asyncio.to_thread(_as_openmetrics, taken)
            return Response(text, media_type=openmetrics.CONTENT_TYPE_LATEST)
        text = await asyncio.to_thread(exposition.generate_latest, taken)
        return Response(text, media_type=exposition.CONTENT_TYPE_LATEST)


class _Taken(CollectorRegistry):
    """Families as they were at one moment."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Those, and nothing else."""
        return iter(self._families)


def _as_openmetrics(registry: CollectorRegistry) -> bytes:
    # prometheus_client leaves this one function unannotated.
    text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
    return text


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are the application's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
