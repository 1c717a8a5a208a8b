"""Metrics as Prometheus reads them: its text format, or OpenMetrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.requests import Request
from starlette.responses import Response


async def expose(request: Request, families: Iterable[Metric]) -> Response:
    """The families as they are now, in the format that the request asks for.

    They are taken between two turns of the loop. Writing a large fleet down takes many times as
    long, so that is done beside it.
    """
    taken = _Taken(list(families))
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
