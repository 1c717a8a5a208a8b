"""The parts of a cluster that tests play, through the API, on either server.

A kubelet says what became of a pod, the scheduler binds it, and the controllers behind budgets and
owner references do their work only when a test says so.
"""

from __future__ import annotations

import json
from typing import Any

from kubernetes import client
from kubernetes.client.exceptions import ApiException

Object = dict[str, Any]
GPU = "nvidia.com/gpu"
NOT_READY = "node.kubernetes.io/not-ready"


def add_node(api: client.ApiClient, name: str, *, devices: int = 8) -> None:
    """A machine that has joined the cluster and is ready."""
    core = client.CoreV1Api(api)
    core.create_node({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
    room = {"cpu": "8", "memory": "64Gi", "pods": "110", GPU: str(devices)}
    core.patch_node_status(name, {"status": {"capacity": room, "allocatable": room}})
    set_ready(api, name, is_ready=True)
    # The node controller lifts the taint that every node starts with.
    taints = core.read_node(name).spec.taints or []
    kept = [{"key": t.key, "effect": t.effect} for t in taints if t.key != NOT_READY]
    core.patch_node(name, {"spec": {"taints": kept}})


def set_ready(api: client.ApiClient, node: str, *, is_ready: bool, reason: str = "Played") -> None:
    """The node condition Ready: True, or Unknown as after a kubelet's silence."""
    condition = {
        "type": "Ready",
        "status": "True" if is_ready else "Unknown",
        "reason": reason if is_ready else "NodeStatusUnknown",
        "message": "" if is_ready else "Kubelet stopped posting node status.",
    }
    client.CoreV1Api(api).patch_node_status(node, {"status": {"conditions": [condition]}})


def bind(api: client.ApiClient, namespace: str, pod: str, node: str) -> None:
    """The scheduler's decision."""
    client.CoreV1Api(api).create_namespaced_pod_binding(
        pod,
        namespace,
        {
            "metadata": {"name": pod},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        },
        # The answer is a Status, which the client takes for a broken Binding.
        _preload_content=False,
    )


def run(
    api: client.ApiClient,
    namespace: str,
    pod: str,
    *,
    address: str = "127.0.0.1",
    is_ready: bool = True,
) -> None:
    """A kubelet's word: the pod's container runs."""
    status = {"phase": "Running", "podIP": address}
    _set_status(api, namespace, pod, status, {"running": {}}, is_ready=is_ready)


def end(api: client.ApiClient, namespace: str, pod: str, *, exit_code: int) -> None:
    """A kubelet's word: the pod's container has ended."""
    phase = "Failed" if exit_code else "Succeeded"
    ended = {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed"}
    _set_status(api, namespace, pod, {"phase": phase}, {"terminated": ended}, is_ready=False)


def remove(api: client.ApiClient, namespace: str, pod: str) -> None:
    """A kubelet's last word on a pod that was deleted: nothing of it runs any more."""
    client.CoreV1Api(api).delete_namespaced_pod(pod, namespace, grace_period_seconds=0)


def settle_budget(
    api: client.ApiClient, namespace: str, budget: str, *, disruptions_allowed: int
) -> None:
    """The disruption controller: how many pods a budget lets go now."""
    objects, version = client.CustomObjectsApi(api), policy_version(api)
    kind = ("policy", version, namespace, "poddisruptionbudgets", budget)
    generation = objects.get_namespaced_custom_object(*kind)["metadata"]["generation"]
    status = {
        "observedGeneration": generation,
        "disruptionsAllowed": disruptions_allowed,
        "currentHealthy": 4,
        "desiredHealthy": 4 - disruptions_allowed,
        "expectedPods": 4,
    }
    objects.patch_namespaced_custom_object_status(*kind, {"status": status})


def policy_version(api: client.ApiClient) -> str:
    """The version of disruption budgets that a server serves: v1, or v1beta1 before 1.21."""
    groups = client.ApisApi(api).get_api_versions().groups
    group = next(item for item in groups if item.name == "policy")
    return str(group.preferred_version.version)


def collect_garbage(api: client.ApiClient, namespace: str) -> None:
    """The garbage collector: pods and services whose owner, a config map, is gone go too."""
    core = client.CoreV1Api(api)
    owners = {item.metadata.uid for item in core.list_namespaced_config_map(namespace).items}
    for pod in core.list_namespaced_pod(namespace).items:
        if _is_orphan(pod.metadata.owner_references, owners):
            core.delete_namespaced_pod(pod.metadata.name, namespace, grace_period_seconds=0)
    for service in core.list_namespaced_service(namespace).items:
        if _is_orphan(service.metadata.owner_references, owners):
            # The answer is a Status on old servers, which the client takes for a broken Service.
            core.delete_namespaced_service(service.metadata.name, namespace, _preload_content=False)


def refusal(error: ApiException) -> tuple[int, str]:
    """The code of a refusal, and its reason for programs if it gives one."""
    return error.status, json.loads(error.body).get("reason", "")


def _is_orphan(references: list[client.V1OwnerReference] | None, owners: set[str]) -> bool:
    return bool(references) and all(reference.uid not in owners for reference in references or ())


def _set_status(
    api: client.ApiClient,
    namespace: str,
    pod: str,
    status: Object,
    state: Object,
    *,
    is_ready: bool,
) -> None:
    core = client.CoreV1Api(api)
    spec = core.read_namespaced_pod(pod, namespace).spec
    containers = [
        {
            "name": container.name,
            "image": container.image,
            "imageID": "",
            "ready": is_ready,
            "restartCount": 0,
            "state": state,
        }
        for container in spec.containers
    ]
    ready = {"type": "Ready", "status": "True" if is_ready else "False"}
    core.patch_namespaced_pod_status(
        pod,
        namespace,
        {"status": {**status, "conditions": [ready], "containerStatuses": containers}},
    )
