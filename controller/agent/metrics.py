"""The agent's page for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What is read at the moment of a scrape, from the scraper's thread."""

    workers_running: Callable[[], float]
    events_buffered: Callable[[], float]
    events_dropped: Callable[[], float]
    heartbeats: Callable[[], float]
    sessions: Callable[[], float]
    connected: Callable[[], float]
    standby_restarts: Callable[[], float]
    host_memory_bytes: Callable[[], float]


class Metrics:
    """Counts and gauges of one agent; every agent has a registry of its own."""

    def __init__(self, readings: Readings) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ReadingsCollector(readings))
        self._server: tuple[WSGIServer, Thread] | None = None
        self.worker_exits = Counter(
            "outlast_agent_worker_exits_total",
            "Workers that ended.",
            ["outcome"],
            registry=self._registry,
        )
        self.uploads = Counter(
            "outlast_agent_uploads_total",
            "Checkpoints committed to storage, and troubles on the way.",
            ["outcome"],
            registry=self._registry,
        )

    def serve(self, port: int) -> int:
        """Serve the page on this port, 0 for a free one; returns the port."""
        server, thread = start_http_server(port, registry=self._registry)
        self._server = (server, thread)
        return int(server.server_port)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()


class _ReadingsCollector(Collector):
    """Asks for the present values at every scrape, so that nothing has to be kept up."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        readings = self._readings
        for name, text, read in (
            ("workers_running", "Worker processes.", readings.workers_running),
            ("events_buffered", "Events not acknowledged yet.", readings.events_buffered),
            ("connected", "1 while a controller is connected.", readings.connected),
            ("host_memory_bytes", "Host memory of checkpoints.", readings.host_memory_bytes),
        ):
            yield GaugeMetricFamily(f"outlast_agent_{name}", text, value=read())
        for name, text, read in (
            ("events_dropped", "Events crowded out of the buffer.", readings.events_dropped),
            ("heartbeats", "Heartbeats sent.", readings.heartbeats),
            ("sessions", "Connections to a controller.", readings.sessions),
            ("standby_restarts", "Ends of the standby process.", readings.standby_restarts),
        ):
            yield CounterMetricFamily(f"outlast_agent_{name}_total", text, value=read())
