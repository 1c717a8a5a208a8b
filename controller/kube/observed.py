"""Pods and hosts as the API server shows them, reduced to what is looked at here.

A *host* is what Kubernetes calls a node; our node is an agent that joined, and
bears the name of its host.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from outlast.ids import NodeId

Json = dict[str, Any]
# A pod in one of these runs nothing any more.
ENDED_PHASES = ("Succeeded", "Failed")
_READY = "Ready"
# The container that the agent runs in.
CONTAINER = "agent"
# Of a container that has ended well.
_DONE = "Completed"
_PULL_FAILURES = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
LABEL_JOB = "outlast.dev/job"
# Of Kueue: which of its local queues admits a pod.
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
ANNOTATION_PROBES = "outlast.dev/probes"
ANNOTATION_AVOIDS = "outlast.dev/avoids"
ANNOTATION_IMAGE = "outlast.dev/image"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a host."""

    key: str
    effect: str
    value: str = ""
    time_added: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What somebody on the cluster says of a host, such as node-problem-detector."""

    status: str
    """True, False or Unknown."""
    message: str
    """Reason and message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine of the cluster."""

    name: NodeId
    resource_version: str
    not_ready: str
    """Why it is not ready, "" when it is."""
    created_s: float = 0.0
    """When it was added to the cluster, since the Unix epoch."""
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    """By type; Ready is not among them."""
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of ours, which holds an agent."""

    name: str
    uid: str
    host: NodeId | None
    """None before it is bound."""
    phase: str
    created_s: float = 0.0
    """By the API server's clock, in whole seconds."""
    detail: str = ""
    """Why it failed or waits, as far as the cluster says."""
    deleting: bool = False
    job: str = ""
    """Label with the job whose workers it holds."""
    probes: str = ""
    """Annotation with the quarantine session that its agent shall try to end."""
    avoids: frozenset[NodeId] = frozenset()
    """Annotation with the hosts that it can never be bound to, which were out at its creation."""

    image: str = ""
    """Annotation with the image of jobs that its agent runs in; "" for that of the agents."""
    pull_failure: str = ""
    """Why the image of its agent has not been fetched, when that has failed."""
    finds_no_host: bool = False
    """Whether the scheduler has looked for a host in vain."""
    gates: tuple[str, ...] = ()
    """Who has to admit it before the scheduler looks for a host."""

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or may still come to run."""
        return not self.deleting and self.phase not in ENDED_PHASES


def read_host(document: Json) -> Host:
    """The host that a Node object describes."""
    metadata, spec = document["metadata"], document.get("spec") or {}
    conditions = {
        item["type"]: Condition(
            status=item["status"],
            message=": ".join(filter(None, (item.get("reason"), item.get("message")))),
        )
        for item in (document.get("status") or {}).get("conditions") or ()
    }
    return Host(
        name=NodeId(metadata["name"]),
        resource_version=metadata["resourceVersion"],
        not_ready=_not_ready(conditions),
        created_s=_seconds(metadata.get("creationTimestamp")),
        conditions={kind: said for kind, said in conditions.items() if kind != _READY},
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(
            Taint(
                key=taint["key"],
                effect=taint["effect"],
                value=taint.get("value") or "",
                time_added=taint.get("timeAdded") or "",
            )
            for taint in spec.get("taints") or ()
        ),
        labels=cast(Mapping[str, str], metadata.get("labels") or {}),
        annotations=cast(Mapping[str, str], metadata.get("annotations") or {}),
    )


def read_pod(document: Json) -> Pod:
    """The pod that a Pod object describes."""
    metadata, status = document["metadata"], document.get("status") or {}
    spec = document.get("spec") or {}
    host = spec.get("nodeName")
    annotations = metadata.get("annotations") or {}
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        host=NodeId(host) if host else None,
        phase=status.get("phase") or "Pending",
        created_s=_seconds(metadata.get("creationTimestamp")),
        detail=_detail(status),
        deleting=bool(metadata.get("deletionTimestamp")),
        job=(metadata.get("labels") or {}).get(LABEL_JOB) or "",
        probes=annotations.get(ANNOTATION_PROBES) or "",
        avoids=frozenset(NodeId(name) for name in annotations.get(ANNOTATION_AVOIDS, "").split()),
        image=annotations.get(ANNOTATION_IMAGE) or "",
        pull_failure=_pull_failure(status),
        finds_no_host=any(
            (condition["type"], condition.get("reason")) == ("PodScheduled", "Unschedulable")
            for condition in status.get("conditions") or ()
        ),
        gates=tuple(gate["name"] for gate in spec.get("schedulingGates") or ()),
    )


def _not_ready(conditions: Mapping[str, Condition]) -> str:
    ready = conditions.get(_READY)
    # A host that has just been added says nothing yet; it is not used, and nothing is held
    # against it.
    if ready is None or ready.status == "True":
        return ""
    return f"Ready is {ready.status}" + (f" ({ready.message})" if ready.message else "")


def _seconds(stamp: str | None) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0


def _detail(status: Json) -> str:
    said = [status.get("reason"), status.get("message")]
    for condition in status.get("conditions") or ():
        if condition.get("status") != "True" or condition["type"] == "DisruptionTarget":
            said += [condition.get("reason"), condition.get("message")]
    containers = (status.get(name) or () for name in ("initContainerStatuses", "containerStatuses"))
    for container in itertools.chain.from_iterable(containers):
        for state in (container.get("state") or {}).values():
            if (state or {}).get("reason") != _DONE:
                said += [(state or {}).get("reason"), (state or {}).get("message")]
    return ": ".join(dict.fromkeys(word for word in said if word))


def _pull_failure(status: Json) -> str:
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if container.get("name") == CONTAINER and waiting.get("reason") in _PULL_FAILURES:
            return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
    return ""
