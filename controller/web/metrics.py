"""What Prometheus reads, computed from the state when it asks.

States are one-hot gauges. The series of a job disappear a while after its end,
so that a controller that lives for months stays small.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import outlast
from controller.core.records import JobRecord
from controller.core.states import AWAY, FREE, IncidentState, JobState, NodeState
from controller.effects import Effects
from controller.rpc.sessions import Sessions
from controller.service import Service
from controller.watch import Watch
from outlast.clock import Clock

# Long enough for any scraper to see how a job ended.
ENDED_JOBS_S = 3_600.0
_COMMIT_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)


class ControllerMetrics(Collector):
    """Everything about jobs, nodes and the controller itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._commits = Histogram(
            "outlast_journal_commit_seconds",
            "Time to make one batch of facts durable",
            buckets=_COMMIT_BUCKETS_S,
            registry=self.registry,
        )
        self._sources: tuple[Service, Watch, Sessions, Effects, Clock] | None = None

    def committed(self, seconds: float) -> None:
        """The journal took so long for an append."""
        self._commits.observe(seconds)

    def read_from(
        self, service: Service, watch: Watch, sessions: Sessions, effects: Effects, clock: Clock
    ) -> None:
        """Say where the figures come from."""
        self._sources = (service, watch, sessions, effects, clock)
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing before anybody asks: the figures are computed in `collect`."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every figure as it is now."""
        assert self._sources is not None, "read_from comes first"
        service, watch, sessions, effects, clock = self._sources
        yield InfoMetricFamily(
            "outlast_build", "Version of the controller", value={"version": outlast.__version__}
        )
        yield _gauge("outlast_controller_term", "Term in which it writes", service.term)
        yield _gauge(
            "outlast_controller_blind",
            "1 while many nodes are silent at once and nothing is replaced",
            service.is_blind,
        )
        alerts = CounterMetricFamily("outlast_alerts", "Alerts raised for people")
        alerts.add_metric([], effects.counts["Alert"])
        yield alerts
        now_s = clock.now_s()
        jobs = [
            job
            for job in service.state.jobs.values()
            if job.finished_s is None or now_s - job.finished_s < ENDED_JOBS_S
        ]
        yield from _job_states(jobs)
        yield from _job_curves(jobs, service)
        yield from _incidents(jobs, service)
        yield from _nodes(service, watch, sessions)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=float(value))


def _job_states(jobs: list[JobRecord]) -> Iterator[Metric]:
    info = InfoMetricFamily("outlast_job", "Facts about a job", labels=["job_id"])
    states = GaugeMetricFamily(
        "outlast_job_state", "1 for the job's present state", labels=["job_id", "state"]
    )
    nodes = GaugeMetricFamily(
        "outlast_job_node_info", "1 for each node of a job", labels=["job_id", "node"]
    )
    restarts = CounterMetricFamily(
        "outlast_restarts", "Starts of the job after its first", labels=["job_id"]
    )
    retries = GaugeMetricFamily(
        "outlast_retries_left", "Faults it may still survive", labels=["job_id"]
    )
    for job in jobs:
        info.add_metric([job.job_id], {"name": job.name})
        for state in JobState:
            states.add_metric([job.job_id, str(state)], float(job.state is state))
        for node in job.nodes:
            if node is not None and job.finished_s is None:
                nodes.add_metric([job.job_id, node], 1.0)
        restarts.add_metric([job.job_id], job.restarts)
        retries.add_metric([job.job_id], job.retry_left)
    yield from (info, states, nodes, restarts, retries)


def _job_curves(jobs: list[JobRecord], service: Service) -> Iterator[Metric]:
    texts = {
        "outlast_step": "Last completed step",
        "outlast_step_last_change_timestamp_seconds": "When it was completed",
        "outlast_loss": "Training loss of the last step",
        "outlast_grad_norm": "Global gradient norm of the last step",
        "outlast_learning_rate": "Learning rate of the last step",
        "outlast_tokens_per_second": "Speed over the last steps",
    }
    gauges = {
        name: GaugeMetricFamily(name, text, labels=["job_id"]) for name, text in texts.items()
    }
    tokens = CounterMetricFamily(
        "outlast_tokens", "Tokens trained on, redone steps included", labels=["job_id"]
    )
    for job in jobs:
        last = service.curves.last(job.job_id)
        if last is None:
            continue
        speed = service.curves.tokens_per_s(job.job_id)
        values = (last.step, last.at_s, last.loss, last.grad_norm, last.learning_rate, speed)
        for gauge, value in zip(gauges.values(), values, strict=True):
            gauge.add_metric([job.job_id], value)
        tokens.add_metric([job.job_id], service.curves.num_tokens(job.job_id))
    yield from gauges.values()
    yield tokens


def _incidents(jobs: list[JobRecord], service: Service) -> Iterator[Metric]:
    """Closed incidents only: until then cause and action may still change, and a
    counter must not fall."""
    shown = [job.job_id for job in jobs]
    counts: Counter[tuple[str, str, str]] = Counter()
    open_ = Counter[str]()
    for incident in service.state.incidents.values():
        if incident.job not in shown:
            continue
        if incident.state is IncidentState.CLOSED:
            counts[incident.job, str(incident.cause), str(incident.action or "none")] += 1
        else:
            open_[incident.job] += 1
    closed = CounterMetricFamily(
        "outlast_incidents", "Incidents that are over", labels=["job_id", "cause", "action"]
    )
    for labels, count in counts.items():
        closed.add_metric(labels, count)
    present = GaugeMetricFamily("outlast_incidents_open", "Open incidents", labels=["job_id"])
    for job_id in shown:
        present.add_metric([job_id], open_[job_id])
    yield from (closed, present)


def _nodes(service: Service, watch: Watch, sessions: Sessions) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "outlast_node_state", "1 for the node's present state", labels=["node", "state"]
    )
    connected = GaugeMetricFamily(
        "outlast_node_connected", "Whether its agent has a session", labels=["node"]
    )
    ages = GaugeMetricFamily(
        "outlast_node_heartbeat_age_seconds", "Since it was last heard", labels=["node"]
    )
    spare = 0
    now_s = asyncio.get_running_loop().time()
    for node in service.state.nodes.values():
        if node.state in AWAY:
            continue
        for state in NodeState:
            states.add_metric([node.node, str(state)], float(node.state is state))
        is_connected = sessions.is_connected(node.node)
        connected.add_metric([node.node], float(is_connected))
        heard_s = watch.heard_s(node.node)
        if heard_s is not None:
            ages.add_metric([node.node], max(0.0, now_s - heard_s))
        spare += node.state in FREE and is_connected and not node.cordoned
    yield from (states, connected, ages)
    yield _gauge("outlast_spare_nodes", "Connected nodes that are free", spare)
