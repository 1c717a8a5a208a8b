"""The objects that the adapter makes: names, labels and manifests. Nothing is sent here.

Names are deterministic: whoever makes the same thing twice, before and after a
crash, gets "already exists". Pods and the service belong to an anchor,
so that deleting the anchor is enough for the cluster to collect them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, cast

from controller.kube.foreign_image import in_image
from controller.kube.observed import (
    ANNOTATION_AVOIDS,
    ANNOTATION_PROBES,
    CONTAINER,
    LABEL_JOB,
    LABEL_QUEUE,
    Json,
    Pod,
)
from controller.kube.quarantine import TAINT
from outlast.access import CA_FILE
from outlast.ids import NodeId
from outlast.startup import python_command

if TYPE_CHECKING:
    # A configuration is checked by making a pod of it.
    from controller.kube.config import KubeConfig

APP = "outlast"
COMPONENT = "agent"
METRICS_PORT = 7072
STATE_DIR = "/var/lib/outlast"
_JOIN_TOKEN_DIR = "/etc/outlast/join"
_TLS_DIR = "/etc/outlast/tls"
MEMORY_DIR = "/dev/shm"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_HOSTNAME_LABEL = "kubernetes.io/hostname"
# The cluster's own patience with a host that does not answer is five minutes; a job waits.
_LOST_HOST_S = 30
# An agent needs up to two seconds for each of its parts when it is stopped.
_GRACE_S = 15


def anchor_name(fleet: str) -> str:
    return f"{fleet}-anchor"


def service_name(fleet: str) -> str:
    return f"{fleet}-agents"


def pod_name(fleet: str, number: int) -> str:
    return f"{fleet}-agent-{number}"


def free_names(fleet: str, pods: Iterable[Pod], count: int) -> list[str]:
    """Names for `count` new pods: the lowest numbers that no pod holds, ended ones included."""
    taken = {pod.name for pod in pods}
    names: list[str] = []
    number = 0
    while len(names) < count:
        name = pod_name(fleet, number)
        if name not in taken:
            names.append(name)
        number += 1
    return names


def labels(fleet: str) -> dict[str, str]:
    """What all objects of a fleet have in common."""
    return {
        "app.kubernetes.io/name": APP,
        "app.kubernetes.io/instance": fleet,
        "app.kubernetes.io/component": COMPONENT,
        "app.kubernetes.io/part-of": APP,
        "app.kubernetes.io/managed-by": "outlast-controller",
    }


def is_ours(document: Json, fleet: str) -> bool:
    """Whether a controller of this fleet has made an object."""
    return labels(fleet).items() <= (document["metadata"].get("labels") or {}).items()


def selector(fleet: str) -> str:
    """The label selector of a fleet's pods."""
    keys = ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component")
    return ",".join(f"{key}={labels(fleet)[key]}" for key in keys)


def checked(config: KubeConfig) -> KubeConfig:
    """`config`, once an agent's pod can be made of it.

    Raises:
        ValueError: its template does not fit.
    """
    try:
        agent_pod(config, "any", "any", (NodeId("any"),))
    except (AttributeError, TypeError, ValueError) as error:
        # What a person wrote may have any shape.
        raise ValueError(f"pod_template does not fit an agent's pod: {error}") from error
    return config


def anchor(config: KubeConfig) -> Json:
    """The object that owns all others of the fleet."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": anchor_name(config.fleet),
            "namespace": config.namespace,
            "labels": labels(config.fleet),
        },
        "data": {"about": "Owns the pods and the service of Outlast's agents."},
    }


def service(config: KubeConfig, anchor_uid: str) -> Json:
    """Names for the agents, also before they are ready: they form groups while they start."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(config.fleet),
            "namespace": config.namespace,
            "labels": labels(config.fleet),
            "ownerReferences": [_owner(config.fleet, anchor_uid)],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": dict(part.split("=", 1) for part in selector(config.fleet).split(",")),
            "ports": [{"name": "metrics", "port": METRICS_PORT}],
        },
    }


def agent_pod(
    config: KubeConfig,
    name: str,
    anchor_uid: str,
    avoid: tuple[NodeId, ...] = (),
    image: str = "",
) -> Json:
    """One agent with all devices of its host, never beside another and never on `avoid`; in the
    image of jobs that is given, or in its own."""
    pod: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": config.namespace,
            "labels": {**labels(config.fleet), **_queue(config)},
            "ownerReferences": [_owner(config.fleet, anchor_uid)],
        },
        "spec": {
            "hostname": name,
            "subdomain": service_name(config.fleet),
            # The agent's container may start again: it finds host memory as it left it.
            "restartPolicy": "Always",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": _GRACE_S,
            "affinity": _one_per_host(),
            "tolerations": _tolerations(config),
            "containers": [_container(config)],
            "volumes": [
                {"name": "state", "emptyDir": {"sizeLimit": config.state_size}},
                {
                    "name": "memory",
                    "emptyDir": {"medium": "Memory", "sizeLimit": config.shared_memory},
                },
            ],
        },
    }
    pod = cast(Json, merge(_with_secrets(pod, config), config.pod_template, "pod"))
    if image:
        pod = in_image(pod, image, agents_image=config.image)
    if not avoid:
        return pod
    # The API server takes one value a requirement there.
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in avoid]
    # For us: what a template says of hosts is nothing that a later look may take back.
    marked = {"metadata": {"annotations": {ANNOTATION_AVOIDS: " ".join(avoid)}}}
    return _place(cast(Json, merge(pod, marked)), away)


def _queue(config: KubeConfig) -> dict[str, str]:
    return {LABEL_QUEUE: config.queue} if config.queue else {}


def probe_pod(config: KubeConfig, name: str, anchor_uid: str, host: NodeId, session: str) -> Json:
    """An agent on one host that is in quarantine, to find out whether it works again."""
    pod = agent_pod(config, name, anchor_uid)
    there = [{"key": "metadata.name", "operator": "In", "values": [host]}]
    past = {
        "metadata": {"annotations": {ANNOTATION_PROBES: session}},
        "spec": {
            "tolerations": [
                {"key": key, "operator": "Exists", "effect": "NoSchedule"}
                for key in (TAINT, "node.kubernetes.io/unschedulable")
            ]
        },
    }
    return _place(cast(Json, merge(pod, past)), there)


def tolerations(config: KubeConfig) -> tuple[Mapping[str, object], ...]:
    """Which taints do not keep an agent off a host."""
    return tuple(agent_pod(config, "any", "any")["spec"]["tolerations"])


def eviction(name: str, namespace: str, uid: str, api_version: str) -> Json:
    """An eviction of exactly this pod, not of a later one of the same name."""
    return {
        "apiVersion": api_version,
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid}},
    }


def deletion(uid: str, grace_s: int | None = None) -> Json:
    """The options of a deletion of exactly this object; None for its own grace period."""
    options: Json = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": uid},
        "propagationPolicy": "Background",
    }
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    return options


def job_label_patch(uid: str, job: str) -> Json:
    """Says on exactly this pod whose workers it holds."""
    return {"metadata": {"uid": uid, "labels": {LABEL_JOB: job or None}}}


def merge(base: object, changes: object, where: str = "it") -> object:
    """`base` with `changes` laid over it: objects key by key, lists of named things by
    name, other lists appended, anything else replaced.

    Raises:
        ValueError: an object or a list would be replaced by something else.
    """
    if isinstance(base, Mapping) and isinstance(changes, Mapping):
        merged = dict(base)
        for key, value in changes.items():
            merged[key] = merge(base[key], value, f"{where}.{key}") if key in base else value
        return merged
    if isinstance(base, list) and isinstance(changes, list):
        merged_list = list(base)
        names = [item.get("name") if isinstance(item, Mapping) else None for item in base]
        for item in changes:
            name = item.get("name") if isinstance(item, Mapping) else None
            if name is not None and name in names:
                place = names.index(name)
                merged_list[place] = merge(merged_list[place], item, f"{where}.{name}")
            else:
                merged_list.append(item)
        return merged_list
    if isinstance(base, Mapping | list):
        wanted = "an object" if isinstance(base, Mapping) else "a list"
        raise ValueError(f"{where} is {changes!r}; it must be {wanted}")
    return changes


def _container(config: KubeConfig) -> Json:
    devices = {config.device: str(config.num_devices)} if config.num_devices else {}
    return {
        "name": CONTAINER,
        "image": config.image,
        "command": list(python_command("controller.agent", executable="python")),
        "args": [
            *("--node", "$(OUTLAST_NODE)"),
            *("--address", "$(OUTLAST_ADDRESS)"),
            *("--controller", config.controller),
            *("--state-dir", STATE_DIR),
            *("--data-dir", f"{STATE_DIR}/data"),
            *("--memory-dir", f"{MEMORY_DIR}/outlast"),
            *("--workers", str(config.workers)),
            *("--metrics-port", str(METRICS_PORT)),
            *config.agent_options,
        ],
        "env": [
            _from_field("OUTLAST_NODE", "spec.nodeName"),
            _from_field("OUTLAST_ADDRESS", "status.podIP"),
        ],
        "ports": [{"name": "metrics", "containerPort": METRICS_PORT}],
        "resources": {"limits": devices, "requests": devices},
        "volumeMounts": [
            {"name": "state", "mountPath": STATE_DIR},
            {"name": "memory", "mountPath": MEMORY_DIR},
        ],
    }


def _with_secrets(pod: Json, config: KubeConfig) -> Json:
    """With what an agent shows the controller, and what it knows the controller by."""
    if config.join_token_secret:
        pod = cast(Json, merge(pod, _with_join_token(config.join_token_secret)))
    if config.ca_secret:
        pod = cast(Json, merge(pod, _with_authority(config.ca_secret)))
    return pod


def _with_join_token(secret: str) -> Json:
    """What an agent shows the controller, as a file: the kubelet replaces it with the Secret."""
    # For the pod's user and group, which is fsGroup's.
    volume = {"name": "join-token", "secret": {"secretName": secret, "defaultMode": 0o440}}
    container = {
        "name": CONTAINER,
        "args": ["--join-token-file", f"{_JOIN_TOKEN_DIR}/token"],
        "volumeMounts": [{"name": "join-token", "mountPath": _JOIN_TOKEN_DIR, "readOnly": True}],
    }
    return {"spec": {"containers": [container], "volumes": [volume]}}


def _with_authority(secret: str) -> Json:
    """What an agent checks the controller's certificate by, and nothing else of the Secret."""
    ca = {"key": CA_FILE, "path": CA_FILE}
    source = {"secretName": secret, "items": [ca], "defaultMode": 0o440}
    container = {
        "name": CONTAINER,
        "args": ["--tls-dir", _TLS_DIR],
        "volumeMounts": [{"name": "tls", "mountPath": _TLS_DIR, "readOnly": True}],
    }
    return {"spec": {"containers": [container], "volumes": [{"name": "tls", "secret": source}]}}


def _from_field(name: str, path: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _one_per_host() -> Json:
    """Agents of any fleet: two of them on one host would fight over its devices."""
    term = {
        "labelSelector": {
            "matchLabels": {
                "app.kubernetes.io/name": APP,
                "app.kubernetes.io/component": COMPONENT,
            }
        },
        # Without it a term is about the pod's own namespace only.
        "namespaceSelector": {},
        "topologyKey": _HOSTNAME_LABEL,
    }
    return {"podAntiAffinity": {_REQUIRED: [term]}}


def _place(pod: Json, fields: list[Json]) -> Json:
    """The pod bound to what is said of its host's own name: a label need not say the same.

    All fields of a term must hold. A template's own terms are alternatives to each other, so
    each of them needs ours.
    """
    affinity = pod["spec"]["affinity"]
    on_nodes = affinity.get("nodeAffinity") or {}
    required = on_nodes.get(_REQUIRED) or {}
    terms = [
        {**term, "matchFields": [*term.get("matchFields", ()), *fields]}
        for term in required.get("nodeSelectorTerms") or [{}]
    ]
    kept = {**on_nodes, _REQUIRED: {**required, "nodeSelectorTerms": terms}}
    return {**pod, "spec": {**pod["spec"], "affinity": {**affinity, "nodeAffinity": kept}}}


def _tolerations(config: KubeConfig) -> list[Json]:
    given: list[Json] = [
        {
            "key": f"node.kubernetes.io/{what}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _LOST_HOST_S,
        }
        for what in ("unreachable", "not-ready")
    ]
    if config.num_devices:
        # Hosts with devices are often tainted, so that only those who want them come.
        given.append({"key": config.device, "operator": "Exists", "effect": "NoSchedule"})
    return given


def _owner(fleet: str, uid: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": anchor_name(fleet),
        "uid": uid,
    }
