"""What one look at the fleet sees: what the machine has decided, and what the cluster shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.core.records import NodeRecord
from controller.kube.observed import Host, Pod
from controller.kube.shares import Claim
from outlast.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One moment. Everything in it may be a little old, and nothing relies on it not being."""

    now_s: float
    """Of a clock that only runs forward."""
    wall_s: float
    """Of the clock of the machine's records."""
    nodes: Mapping[NodeId, NodeRecord]
    claims: tuple[Claim, ...]
    """Nodes that the jobs need, spares included, in the order in which jobs are served."""
    incarnations: Mapping[NodeId, str]
    """Agents that are connected."""
    pods: tuple[Pod, ...]
    hosts: Mapping[NodeId, Host]
    refusal: str = ""
    """Why the last pod that was wanted could not be made."""
    _on_hosts: dict[NodeId, Pod] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Asked of every node at every look: not pods times nodes each time.
        found: dict[NodeId, Pod] = {}
        for pod in sorted(self.pods, key=lambda pod: (not pod.is_alive, pod.deleting, pod.name)):
            if pod.host is not None:
                found.setdefault(pod.host, pod)
        object.__setattr__(self, "_on_hosts", found)

    def pod_on(self, host: NodeId) -> Pod | None:
        """The pod of ours on a host; one that is alive before any other."""
        return self._on_hosts.get(host)
