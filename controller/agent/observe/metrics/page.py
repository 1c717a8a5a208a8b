"""The agent's page for Prometheus.

No series says which node it is about: the scraper knows that of its target.
What belongs to the agent's event loop is read there; the rest is read in the
scraper's thread, which may take its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from controller.agent.observe.links import Links
from controller.agent.observe.metrics import gpu, host, itself, network, ranks
from controller.agent.observe.metrics.reading import Reading
from controller.families import Family
from controller.otlp import metrics as otlp
from controller.otlp.queue import ExportQueue
from outlast.errors import FatalError

FAMILIES: tuple[Family, ...] = (
    *(*itself.FAMILIES, *ranks.FAMILIES),
    *(*host.FAMILIES, *network.FAMILIES, *gpu.FAMILIES),
    *otlp.FAMILIES,
)
# A loop that does not turn for so long has a trouble of its own; the scrape fails.
_READ_WITHIN_S = 5.0


class MetricsAddressError(FatalError):
    """The page cannot be served where it was asked for."""


class Metrics(Collector):
    """The page of one agent. Make it inside the agent's event loop."""

    def __init__(
        self,
        read: Callable[[], Reading],
        folders: host.Folders,
        links: Links,
        export: ExportQueue | None = None,
    ) -> None:
        """`read` is called in the event loop."""
        self._export = export
        self._read = read
        self._folders = folders
        self._links = links
        self._gpus = gpu.Gpus(gpu.load_nvml())
        self._loop = asyncio.get_running_loop()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._server: tuple[WSGIServer, Thread] | None = None

    def serve(self, address: str, port: int) -> int:
        """Serve the page there, port 0 for a free one; returns the port.

        Raises:
            MetricsAddressError: someone else has the port, the address is not ours, or there is
                no thread left to serve it.
        """
        try:
            server, thread = start_http_server(port, addr=address, registry=self._registry)
        except (OSError, RuntimeError) as error:
            raise MetricsAddressError(
                f"cannot serve metrics at {address}:{port}: {error}; choose another --metrics-port"
            ) from error
        self._server = (server, thread)
        return int(server.server_port)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def describe(self) -> list[Metric]:
        """Nothing before anybody asks."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every value as it is now; called in the scraper's thread."""
        asked = asyncio.run_coroutine_threadsafe(self._read_in_loop(), self._loop)
        reading = asked.result(_READ_WITHIN_S)
        yield from itself.collect(reading, self._folders.memory_dir)
        yield from ranks.collect(reading.ranks)
        yield from host.collect(Path("/"), self._folders)
        yield from network.collect(Path("/"), self._links.windows)
        yield from self._gpus.collect()
        yield from otlp.collect(self._export)

    async def _read_in_loop(self) -> Reading:
        return self._read()
