"""Views for tests of the adapter's pure parts."""

from __future__ import annotations

from typing import Any

from controller.core.records import NodeRecord
from controller.core.states import NodeState
from controller.kube.config import KubeConfig, Patience
from controller.kube.observed import Host, Pod
from controller.kube.shares import Claim
from controller.kube.view import View
from outlast.ids import JobId, NodeId

CONFIG = KubeConfig(
    namespace="train",
    image="outlast:1",
    controller="outlast-controller.train:7070",
    workers=8,
    patience=Patience(idle_s=300.0, join_s=900.0, evict_s=30.0, terminate_s=30.0),
)
FLEET = "train/outlast"


def host(name: str, **changes: Any) -> Host:
    """A healthy host."""
    values: dict[str, Any] = {"resource_version": "7", "not_ready": "", "annotations": {}}
    return Host(name=NodeId(name), **{**values, **changes})


def pod(name: str, on: str | None = None, **changes: Any) -> Pod:
    """A pod of the fleet that runs, or waits to be bound."""
    values: dict[str, Any] = {
        "uid": f"uid-{name}",
        "host": None if on is None else NodeId(on),
        "phase": "Pending" if on is None else "Running",
    }
    return Pod(name=name, **{**values, **changes})


def node(name: str, state: NodeState = NodeState.READY, **changes: Any) -> NodeRecord:
    """A node as the machine knows it; its agent is the process `first`."""
    values: dict[str, Any] = {
        "since_s": 0.0,
        "reason": "a reason",
        "incarnation": "first",
        "address": "10.0.0.1",
        "rendezvous_port": 1,
        "workers": 8,
        "job": JobId("gpt-1") if state is NodeState.ASSIGNED else None,
    }
    return NodeRecord(node=NodeId(name), state=state, **{**values, **changes})


def wanted(nodes: int, image: str = "") -> tuple[Claim, ...]:
    """One job wants so many nodes."""
    return (Claim(nodes=nodes, image=image),) if nodes else ()


def view(
    *,
    nodes: tuple[NodeRecord, ...] = (),
    pods: tuple[Pod, ...] = (),
    hosts: tuple[Host, ...] = (),
    num_wanted: int = 0,
    claims: tuple[Claim, ...] | None = None,
    connected: tuple[str, ...] = (),
    now_s: float = 0.0,
) -> View:
    """One moment; both clocks show the same time."""
    return View(
        now_s=now_s,
        wall_s=now_s,
        nodes={record.node: record for record in nodes},
        claims=claims if claims is not None else wanted(num_wanted),
        incarnations={NodeId(name): "first" for name in connected},
        pods=pods,
        hosts={seen.name: seen for seen in hosts},
    )
