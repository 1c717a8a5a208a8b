"""What the server fills in and refuses, kind by kind, when objects are written.

The rules are those that a mistake of ours could break; a real server knows many more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.kube.fake.errors import invalid
from tests.kube.fake.resources import Resource

Object = dict[str, Any]

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(
    r"([a-z0-9][-a-z0-9.]{0,251}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
_RBAC_NAME = re.compile(r"[^/%]+")

_TAINT_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_NOT_READY = "node.kubernetes.io/not-ready"
_UNREACHABLE = "node.kubernetes.io/unreachable"
# What a pod may still change after its creation; tolerations may only grow.
_MUTABLE_POD_FIELDS = ("activeDeadlineSeconds", "terminationGracePeriodSeconds", "tolerations")


def admit_new(resource: Resource, item: Object) -> Object:
    """The object as it is stored; ApiError 422 when it is not acceptable."""
    _check_metadata(resource, item)
    item = _NEW.get(resource.kind, lambda _, item: item)(resource, item)
    if resource.counts_generations:
        item["metadata"]["generation"] = 1
        item.pop("status", None)
    return item


def admit_update(resource: Resource, before: Object, after: Object) -> Object:
    """The object as it is stored by a write to the object itself, not to its status."""
    _check_metadata(resource, after)
    if "status" in resource.subresources:
        after = {key: value for key, value in after.items() if key != "status"}
        if "status" in before:
            after["status"] = before["status"]
    match resource.kind:
        case "Pod":
            _check_pod_change(before, after)
        case "Node":
            _check_taints(after)
    if resource.counts_generations and after.get("spec") != before.get("spec"):
        generation = before["metadata"]["generation"] + 1
        after = {**after, "metadata": {**after["metadata"], "generation": generation}}
    return after


def admit_status(before: Object, after: Object) -> Object:
    """The object as it is stored by a write to its status: the spec stays as it was."""
    kept = {key: value for key, value in after.items() if key != "spec"}
    return {**kept, "spec": before["spec"]} if "spec" in before else kept


def _check_metadata(resource: Resource, item: Object) -> None:
    metadata = item["metadata"]
    name = metadata.get("name", "")
    shape = {"Service": _SERVICE_NAME, "Namespace": _DNS_LABEL}.get(
        resource.kind, _RBAC_NAME if resource.group.startswith("rbac.") else _DNS_SUBDOMAIN
    )
    if not name:
        raise _refuse(
            resource, item, "metadata.name: Required value: name or generateName is required"
        )
    if not shape.fullmatch(name):
        raise _refuse(resource, item, f'metadata.name: Invalid value: "{name}"')
    for key, value in (metadata.get("labels") or {}).items():
        if not _LABEL_KEY.fullmatch(key):
            raise _refuse(resource, item, f'metadata.labels: Invalid value: "{key}"')
        if not isinstance(value, str) or not _LABEL_VALUE.fullmatch(value):
            raise _refuse(resource, item, f'metadata.labels: Invalid value: "{value}"')
    for owner in metadata.get("ownerReferences") or ():
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                raise _refuse(
                    resource,
                    item,
                    f"metadata.ownerReferences.{field}: Invalid value: must not be empty",
                )
    for finalizer in metadata.get("finalizers") or ():
        if "/" not in finalizer and finalizer not in ("foregroundDeletion", "orphan"):
            raise _refuse(
                resource,
                item,
                f'metadata.finalizers[0]: Invalid value: "{finalizer}": name is neither a '
                "standard finalizer name nor is it fully qualified",
            )


def _refuse(resource: Resource, item: Object, why: str) -> Exception:
    what = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    return invalid(what, item["metadata"].get("name", ""), why)


def _new_namespace(resource: Resource, item: Object) -> Object:
    return {**item, "spec": {"finalizers": ["kubernetes"]}, "status": {"phase": "Active"}}


def _new_node(resource: Resource, item: Object) -> Object:
    spec = dict(item.get("spec") or {})
    taints = list(spec.get("taints") or ())
    if not any(taint["key"] == _NOT_READY for taint in taints):
        # The admission plugin TaintNodesByCondition: a node starts as not ready, and a controller
        # lifts it, whoever plays that.
        taints.append({"key": _NOT_READY, "effect": "NoSchedule"})
    item = {**item, "spec": {**spec, "taints": taints}}
    _check_taints(item)
    return item


def _check_taints(item: Object) -> None:
    seen = set()
    for taint in (item.get("spec") or {}).get("taints") or ():
        if taint.get("effect") not in _TAINT_EFFECTS:
            raise invalid(
                "Node",
                item["metadata"]["name"],
                f'spec.taints.effect: Unsupported value: "{taint.get("effect")}"',
            )
        identity = (taint["key"], taint["effect"])
        if identity in seen:
            raise invalid(
                "Node", item["metadata"]["name"], f"spec.taints: Duplicate value: {identity}"
            )
        seen.add(identity)


def _new_pod(resource: Resource, item: Object) -> Object:
    spec = dict(item.get("spec") or {})
    containers = spec.get("containers") or ()
    if not containers:
        raise _refuse(resource, item, "spec.containers: Required value")
    names = [container.get("name", "") for container in containers]
    for at, container in enumerate(containers):
        where = f"spec.containers[{at}]"
        if not _DNS_LABEL.fullmatch(names[at]):
            raise _refuse(resource, item, f'{where}.name: Invalid value: "{names[at]}"')
        if not container.get("image"):
            raise _refuse(resource, item, f"{where}.image: Required value")
    if len(set(names)) < len(names):
        raise _refuse(resource, item, "spec.containers: Duplicate value")
    _check_node_affinity(item)
    spec["containers"] = [_filled_container(container) for container in containers]
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("schedulerName", "default-scheduler")
    tolerations = list(spec.get("tolerations") or ())
    # The admission plugin DefaultTolerationSeconds.
    for key in (_NOT_READY, _UNREACHABLE):
        if not any(_tolerates(toleration, key) for toleration in tolerations):
            tolerations.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 300,
                }
            )
    spec["tolerations"] = tolerations
    return {**item, "spec": spec, "status": {"phase": "Pending", "qosClass": "BestEffort"}}


def _check_node_affinity(item: Object) -> None:
    affinity = (item["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    for term in required.get("nodeSelectorTerms") or ():
        for need in term.get("matchFields") or ():
            if need["key"] != "metadata.name" or len(need.get("values") or ()) != 1:
                raise invalid(
                    "Pod",
                    item["metadata"]["name"],
                    "spec.affinity.nodeAffinity: matchFields: must be only one value when "
                    "`operator` is 'In' or 'NotIn' for node field selector",
                )


def _filled_container(container: Object) -> Object:
    resources = container.get("resources") or {}
    if "limits" not in resources:
        return container
    requests = {**resources["limits"], **(resources.get("requests") or {})}
    return {**container, "resources": {**resources, "requests": requests}}


def _tolerates(toleration: Object, key: str) -> bool:
    return toleration.get("key", "") in ("", key) and toleration.get("effect") in (
        None,
        "",
        "NoExecute",
    )


def _check_pod_change(before: Object, after: Object) -> None:
    def fixed(item: Object) -> Object:
        spec = {key: item["spec"][key] for key in item["spec"] if key not in _MUTABLE_POD_FIELDS}
        spec["containers"] = [
            {key: value for key, value in container.items() if key != "image"}
            for container in item["spec"]["containers"]
        ]
        return spec

    tolerations = after["spec"].get("tolerations") or ()
    shrunk = [item for item in before["spec"].get("tolerations") or () if item not in tolerations]
    if fixed(before) != fixed(after) or shrunk:
        raise invalid(
            "Pod",
            before["metadata"]["name"],
            "spec: Forbidden: pod updates may not change fields other than "
            "`spec.containers[*].image`, `spec.activeDeadlineSeconds` or `spec.tolerations`",
        )


def _new_service(resource: Resource, item: Object) -> Object:
    spec = dict(item.get("spec") or {})
    if not spec.get("ports") and spec.get("clusterIP") != "None":
        raise _refuse(resource, item, "spec.ports: Required value")
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    spec["ports"] = [
        {"protocol": "TCP", "targetPort": port["port"], **port} for port in spec.get("ports") or ()
    ]
    return {**item, "spec": spec, "status": {"loadBalancer": {}}}


def _new_event(resource: Resource, item: Object) -> Object:
    namespace = item["metadata"]["namespace"]
    about = item.get("involvedObject") or {}
    # Events about nodes lie in `default`, unless they claim that the node has a namespace.
    if about.get("namespace", "") != namespace and (
        about.get("namespace") or namespace != "default"
    ):
        raise _refuse(
            resource,
            item,
            f'involvedObject.namespace: Invalid value: "{about.get("namespace", "")}": does not '
            "match event.namespace",
        )
    return item


def _new_deployment(resource: Resource, item: Object) -> Object:
    spec = item.get("spec") or {}
    template = spec.get("template") or {}
    wanted = ((spec.get("selector") or {}).get("matchLabels")) or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    if not wanted:
        raise _refuse(resource, item, "spec.selector: Required value")
    if any(labels.get(key) != value for key, value in wanted.items()):
        raise _refuse(
            resource,
            item,
            "spec.template.metadata.labels: Invalid value: `selector` does not match template "
            "`labels`",
        )
    return item


_NEW: dict[str, Callable[[Resource, Object], Object]] = {
    "Namespace": _new_namespace,
    "Node": _new_node,
    "Pod": _new_pod,
    "Service": _new_service,
    "Event": _new_event,
    "Deployment": _new_deployment,
}
