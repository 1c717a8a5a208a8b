"""The words of the contract suites: pods to ask with, and what an answer comes to."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from tests.kube import played
from tests.kube.cluster import Kube

Object = dict[str, Any]
ALREADY_EXISTS = (409, "AlreadyExists")
CONFLICT = (409, "Conflict")
FORBIDDEN = (403, "Forbidden")
INVALID = (422, "Invalid")
NOT_FOUND = (404, "NotFound")
MERGE = {"_content_type": "application/merge-patch+json"}


def pod(name: str, *, node: str | None = None, **spec: Any) -> Object:
    """The body of a pod, on a node at once when one is given."""
    container = {"name": "agent", "image": "outlast", "resources": {"limits": {played.GPU: "8"}}}
    labels = {"app.kubernetes.io/name": "outlast", "outlast.dev/index": name[-1]}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"nodeName": node, "containers": [container], **spec},
    }


def refused(call: Any, *arguments: Any, **named: Any) -> tuple[int, str]:
    """How a call is refused: code and reason. It must be."""
    with pytest.raises(ApiException) as caught:
        call(*arguments, **named)
    return played.refusal(caught.value)


def running(kube: Kube, name: str, node: str = "node-a") -> client.V1Pod:
    """A pod that its kubelet says runs."""
    kube.core().create_namespaced_pod(kube.namespace, pod(name, node=node))
    played.run(kube.client(), kube.namespace, name)
    return kube.core().read_namespaced_pod(name, kube.namespace)


def events(call: Any, *arguments: Any, **named: Any) -> list[tuple[str, str]]:
    """Kind and name of each event until the server ends the watch."""
    stream = watch.Watch().stream(call, *arguments, timeout_seconds=1, **named)
    return [(event["type"], event["object"].metadata.name) for event in stream]


def eviction(name: str, **options: Any) -> Object:
    """The body of an eviction, without a version: the server takes its own."""
    return {"metadata": {"name": name}, "deleteOptions": options}
