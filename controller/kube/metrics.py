"""What Prometheus reads of the adapter: its pods, and what the API server did for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.kube.cluster import KubeCluster

_PHASES = ("Pending", "Running", "Terminating", "Succeeded", "Failed", "Unknown")


class KubeMetrics(Collector):
    """Pods of the fleet, and what was done and failed."""

    def __init__(self, cluster: KubeCluster) -> None:
        self._cluster = cluster

    def describe(self) -> list[Metric]:
        """Nothing before anybody asks: the figures are computed in `collect`."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every figure as it is now."""
        pods = GaugeMetricFamily(
            "outlast_kube_pods", "Agent pods as they were last seen", labels=["phase"]
        )
        phases = Counter("Terminating" if p.deleting else p.phase for p in self._cluster.pods)
        for phase in _PHASES:
            pods.add_metric([phase], phases[phase])
        done = CounterMetricFamily(
            "outlast_kube_operations",
            "What the API server did for us, or failed to",
            labels=["operation", "result"],
        )
        for (operation, result), count in self._cluster.counts.items():
            done.add_metric([operation, result], count)
        yield from (pods, done)
