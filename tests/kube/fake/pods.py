"""What only pods can: be bound to a node, and be evicted under a disruption budget."""

from __future__ import annotations

from dataclasses import replace

from tests.kube.fake import errors
from tests.kube.fake.api import Verbs, timestamp
from tests.kube.fake.resources import Resource, Target
from tests.kube.fake.selectors import matches_labels
from tests.kube.fake.store import Object

# Served under pods/eviction whatever version of budgets is served beside it.
_EVICTION_VERSIONS = {
    "v1": ("policy/v1", "policy/v1beta1"),
    "v1beta1": ("policy/v1beta1",),
}


def bind(verbs: Verbs, target: Target, body: Object) -> None:
    """Place a pod on a node; ApiError 409 when it has one."""
    pod = verbs.get(target)
    if pod["spec"].get("nodeName"):
        raise errors.conflict(
            "pods/binding",
            target.name,
            f'pod {target.name} is already assigned to node "{pod["spec"]["nodeName"]}"',
        )
    node = (body.get("target") or {}).get("name")
    if not node:
        raise errors.invalid("Binding", target.name, "target.name: Required value")
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp()}
    status = {**pod["status"], "conditions": [scheduled]}
    verbs.store.put(
        target.resource, {**pod, "spec": {**pod["spec"], "nodeName": node}, "status": status}
    )


def evict(verbs: Verbs, target: Target, body: Object) -> None:
    """Delete a pod if its budget has room; ApiError 429 when it has none."""
    budgets = next(item for item in verbs.resources if item.kind == "PodDisruptionBudget")
    version = body.get("apiVersion")
    if version and version not in _EVICTION_VERSIONS[budgets.version]:
        raise errors.bad_request(
            f'no kind "Eviction" is registered for version "{version}" in scheme'
        )
    pod = verbs.get(target)
    going = "deletionTimestamp" in pod["metadata"]
    # Such pods count for no budget.
    if not going and pod["status"]["phase"] not in ("Succeeded", "Failed", "Pending"):
        _take_from_budget(verbs, budgets, pod)
    plain = replace(target, subresource="")
    verbs.delete(plain, body.get("deleteOptions") or {})


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _take_from_budget(verbs: Verbs, budgets: Resource, pod: Object) -> None:
    labels, name = pod["metadata"].get("labels") or {}, pod["metadata"]["name"]
    found = verbs.store.find(
        budgets,
        pod["metadata"]["namespace"],
        lambda budget: matches_labels(budget["spec"].get("selector") or {}, labels),
    )
    if not found:
        return
    if len(found) > 1:
        raise errors.ApiError(
            500,
            "",
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does "
            "not support.",
        )
    budget = found[0]
    status = budget.get("status") or {}
    budget_name = budget["metadata"]["name"]
    needed = status.get("desiredHealthy", 0)
    if not _is_ready(pod) and 0 < needed <= status.get("currentHealthy", 0):
        # It is none of those that the budget counts on.
        return
    if status.get("observedGeneration", 0) < budget["metadata"]["generation"]:
        raise errors.ApiError(
            429,
            "TooManyRequests",
            f"Cannot evict pod as it would violate the pod's disruption budget. The disruption "
            f"budget {budget_name} is still being processed by the server.",
            retry_after_s=10,
        )
    allowed = status.get("disruptionsAllowed", 0)
    if allowed < 1:
        raise errors.ApiError(
            429,
            "TooManyRequests",
            f"Cannot evict pod as it would violate the pod's disruption budget. The disruption "
            f"budget {budget_name} needs {status.get('desiredHealthy', 0)} healthy pods and has "
            f"{status.get('currentHealthy', 0)} currently",
        )
    disrupted = {**(status.get("disruptedPods") or {}), name: timestamp()}
    verbs.store.put(
        budgets,
        {
            **budget,
            "status": {**status, "disruptionsAllowed": allowed - 1, "disruptedPods": disrupted},
        },
    )
