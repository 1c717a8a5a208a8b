"""What Prometheus reads of the adapter: its pods, and what the API server did for it."""

from __future__ import annotations

from collections import Counter as Counted
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from controller.families import Counter, Gauge

if TYPE_CHECKING:
    # The Kubernetes client comes with it, and declarations need none.
    from controller.kube.cluster import KubeCluster

_PHASES = ("Pending", "Running", "Terminating", "Succeeded", "Failed", "Unknown")

PODS = Gauge("outlast_kube_pods", "Agent pods as they were last seen", ("phase",))
OPERATIONS = Counter(
    "outlast_kube_operations_total",
    "What the API server did for the controller, or failed to",
    ("operation", "result"),
)
FAMILIES = (PODS, OPERATIONS)


def collect(cluster: KubeCluster) -> Iterator[Metric]:
    """Every figure as it is now."""
    phases = Counted("Terminating" if p.deleting else p.phase for p in cluster.pods)
    yield PODS.of([((phase,), phases[phase]) for phase in _PHASES])
    yield OPERATIONS.of(cluster.counts.items())
