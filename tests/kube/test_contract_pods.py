"""What the adapter relies on in pods and their eviction, asked of both servers."""

from __future__ import annotations

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from tests.kube import played
from tests.kube.asked import (
    CONFLICT,
    INVALID,
    NOT_FOUND,
    Object,
    eviction,
    pod,
    refused,
    running,
)
from tests.kube.cluster import Kube

EXCLUSIVE = "requiredDuringSchedulingIgnoredDuringExecution"


# Pods.


def test_a_pod_starts_pending_and_unbound(kube: Kube, core: client.CoreV1Api) -> None:
    made = core.create_namespaced_pod(kube.namespace, pod("w-0"))
    assert made.status.phase == "Pending"
    assert made.spec.node_name is None
    assert made.spec.termination_grace_period_seconds == 30
    assert made.spec.containers[0].resources.requests == {played.GPU: "8"}


def test_tolerations_of_lost_nodes_are_filled_in_unless_given(
    kube: Kube, core: client.CoreV1Api
) -> None:
    short = {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 5,
    }
    made = core.create_namespaced_pod(kube.namespace, pod("w-0", tolerations=[short]))
    found = {item.key: item.toleration_seconds for item in made.spec.tolerations}
    assert found == {"node.kubernetes.io/unreachable": 5, "node.kubernetes.io/not-ready": 300}


def test_a_pod_is_bound_once(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    played.bind(kube.client(), kube.namespace, "w-0", "node-a")
    assert core.read_namespaced_pod("w-0", kube.namespace).spec.node_name == "node-a"
    again = (kube.client(), kube.namespace, "w-0", "node-b")
    assert refused(played.bind, *again) == CONFLICT


@pytest.mark.parametrize(
    "broken",
    [
        pod("w-0", containers=[]),
        pod("w-0", containers=[{"name": "Bad_Name", "image": "outlast"}]),
        pod("w-0", containers=[{"name": "agent"}]),
        {**pod("w-0"), "metadata": {"name": "Bad_Name"}},
        {**pod("w-0"), "metadata": {"name": "w-0", "labels": {"job": "no spaces"}}},
        {**pod("w-0"), "metadata": {"name": "w-0", "labels": {"job": "x" * 64}}},
    ],
    ids=["no container", "container name", "no image", "pod name", "label", "long label"],
)
def test_a_pod_that_makes_no_sense_is_invalid(
    kube: Kube, core: client.CoreV1Api, broken: Object
) -> None:
    assert refused(core.create_namespaced_pod, kube.namespace, broken) == INVALID


def test_a_pod_may_keep_off_hosts_by_name_one_at_a_time(kube: Kube, core: client.CoreV1Api) -> None:
    def keeping_off(name: str, *needs: list[str]) -> Object:
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": need} for need in needs]
        terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
        return pod(name, affinity={"nodeAffinity": {EXCLUSIVE: terms}})

    core.create_namespaced_pod(kube.namespace, keeping_off("w-0", ["node-a"], ["node-b"]))
    both = keeping_off("w-1", ["node-a", "node-b"])
    assert refused(core.create_namespaced_pod, kube.namespace, both) == INVALID


def test_the_spec_of_a_pod_stays(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0", node="node-a"))
    change = {"spec": {"nodeName": "node-b"}}
    assert refused(core.patch_namespaced_pod, "w-0", kube.namespace, change) == INVALID


def test_labels_of_a_pod_change_and_go(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    core.patch_namespaced_pod("w-0", kube.namespace, {"metadata": {"labels": {"job": "j"}}})
    changed = core.patch_namespaced_pod(
        "w-0",
        kube.namespace,
        {"metadata": {"labels": {"job": None, "app.kubernetes.io/name": "x"}}},
    )
    assert changed.metadata.labels == {"app.kubernetes.io/name": "x", "outlast.dev/index": "0"}


def test_a_kubelet_says_what_became_of_a_pod(kube: Kube) -> None:
    assert running(kube, "w-0").status.phase == "Running"
    played.end(kube.client(), kube.namespace, "w-0", exit_code=137)
    ended = kube.core().read_namespaced_pod("w-0", kube.namespace).status
    assert ended.phase == "Failed"
    assert ended.container_statuses[0].state.terminated.exit_code == 137


def test_status_is_written_through_its_subresource_only(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    core.patch_namespaced_pod("w-0", kube.namespace, {"status": {"phase": "Running"}})
    assert core.read_namespaced_pod("w-0", kube.namespace).status.phase == "Pending"
    both = {"spec": {"activeDeadlineSeconds": 9}, "status": {"phase": "Running"}}
    after = core.patch_namespaced_pod_status("w-0", kube.namespace, both)
    assert (after.status.phase, after.spec.active_deadline_seconds) == ("Running", None)


def test_a_running_pod_ends_gracefully(kube: Kube, core: client.CoreV1Api) -> None:
    running(kube, "w-0")
    core.delete_namespaced_pod("w-0", kube.namespace)
    going = core.read_namespaced_pod("w-0", kube.namespace).metadata
    assert going.deletion_timestamp
    assert going.deletion_grace_period_seconds == 30
    played.remove(kube.client(), kube.namespace, "w-0")
    assert refused(core.read_namespaced_pod, "w-0", kube.namespace) == NOT_FOUND


def test_a_pod_that_runs_nothing_goes_at_once(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    running(kube, "w-1")
    played.end(kube.client(), kube.namespace, "w-1", exit_code=0)
    for name in ("w-0", "w-1"):
        core.delete_namespaced_pod(name, kube.namespace)
        assert refused(core.read_namespaced_pod, name, kube.namespace) == NOT_FOUND


def test_a_pod_that_is_going_goes_sooner_only_when_told(kube: Kube, core: client.CoreV1Api) -> None:
    running(kube, "w-0")

    def grace_s(**named: int) -> int:
        core.delete_namespaced_pod("w-0", kube.namespace, **named)
        found = core.read_namespaced_pod("w-0", kube.namespace).metadata
        return int(found.deletion_grace_period_seconds)

    assert grace_s(grace_period_seconds=20) == 20
    assert grace_s() == 20
    assert grace_s(grace_period_seconds=60) == 20
    assert grace_s(grace_period_seconds=10) == 10
    # Its end alone does not remove it: its kubelet has the last word.
    played.end(kube.client(), kube.namespace, "w-0", exit_code=1)
    assert grace_s() == 10
    played.remove(kube.client(), kube.namespace, "w-0")
    assert refused(core.read_namespaced_pod, "w-0", kube.namespace) == NOT_FOUND


def test_a_deletion_meant_for_another_pod_conflicts(kube: Kube, core: client.CoreV1Api) -> None:
    uid = running(kube, "w-0").metadata.uid
    other = {"preconditions": {"uid": "another"}}
    assert refused(core.delete_namespaced_pod, "w-0", kube.namespace, body=other) == CONFLICT
    ours = {"preconditions": {"uid": uid}, "gracePeriodSeconds": 0}
    core.delete_namespaced_pod("w-0", kube.namespace, body=ours)
    assert refused(core.read_namespaced_pod, "w-0", kube.namespace) == NOT_FOUND


def test_a_finalizer_holds_a_pod(kube: Kube, core: client.CoreV1Api) -> None:
    body = pod("w-0")
    body["metadata"]["finalizers"] = ["outlast.dev/flush"]
    core.create_namespaced_pod(kube.namespace, body)
    core.delete_namespaced_pod("w-0", kube.namespace, grace_period_seconds=0)
    assert core.read_namespaced_pod("w-0", kube.namespace).metadata.deletion_timestamp
    core.patch_namespaced_pod("w-0", kube.namespace, {"metadata": {"finalizers": None}})
    assert refused(core.read_namespaced_pod, "w-0", kube.namespace) == NOT_FOUND


def test_pods_are_deleted_by_label(kube: Kube, core: client.CoreV1Api) -> None:
    for name in ("w-0", "w-1"):
        core.create_namespaced_pod(kube.namespace, pod(name))
    core.delete_collection_namespaced_pod(kube.namespace, label_selector="outlast.dev/index=0")
    left = core.list_namespaced_pod(kube.namespace).items
    assert [item.metadata.name for item in left] == ["w-1"]


# Eviction.


def make_budget(kube: Kube, name: str = "agents") -> None:
    version = played.policy_version(kube.client())
    body = {
        "apiVersion": f"policy/{version}",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {
            "maxUnavailable": 0,
            "selector": {"matchLabels": {"app.kubernetes.io/name": "outlast"}},
        },
    }
    objects = client.CustomObjectsApi(kube.client())
    objects.create_namespaced_custom_object(
        "policy", version, kube.namespace, "poddisruptionbudgets", body
    )


def test_budgets_have_one_version_and_the_other_is_missing(kube: Kube) -> None:
    served = played.policy_version(kube.client())
    other = {"v1": "v1beta1", "v1beta1": "v1"}[served]
    objects = client.CustomObjectsApi(kube.client())
    where = (kube.namespace, "poddisruptionbudgets")
    assert objects.list_namespaced_custom_object("policy", served, *where)["items"] == []
    with pytest.raises(ApiException) as caught:
        objects.list_namespaced_custom_object("policy", other, *where)
    assert caught.value.status == 404


@pytest.mark.parametrize("version", ["", "served"])
def test_an_eviction_deletes_gracefully(kube: Kube, core: client.CoreV1Api, version: str) -> None:
    running(kube, "w-0")
    body = eviction("w-0")
    if version:
        body["apiVersion"] = f"policy/{played.policy_version(kube.client())}"
    core.create_namespaced_pod_eviction("w-0", kube.namespace, body)
    assert core.read_namespaced_pod("w-0", kube.namespace).metadata.deletion_timestamp


def test_an_eviction_meant_for_another_pod_conflicts(kube: Kube, core: client.CoreV1Api) -> None:
    running(kube, "w-0")
    body = eviction("w-0", preconditions={"uid": "another"})
    assert refused(core.create_namespaced_pod_eviction, "w-0", kube.namespace, body) == CONFLICT
    assert not core.read_namespaced_pod("w-0", kube.namespace).metadata.deletion_timestamp


def test_a_pod_that_is_gone_cannot_be_evicted(kube: Kube, core: client.CoreV1Api) -> None:
    call = (core.create_namespaced_pod_eviction, "w-0", kube.namespace, eviction("w-0"))
    assert refused(*call) == NOT_FOUND


def test_a_budget_refuses_until_it_has_room(kube: Kube, core: client.CoreV1Api) -> None:
    for name in ("w-0", "w-1"):
        running(kube, name)
    make_budget(kube)
    too_many = (429, "TooManyRequests")
    evict = core.create_namespaced_pod_eviction
    # Nobody has counted yet.
    assert refused(evict, "w-0", kube.namespace, eviction("w-0")) == too_many
    played.settle_budget(kube.client(), kube.namespace, "agents", disruptions_allowed=0)
    assert refused(evict, "w-0", kube.namespace, eviction("w-0")) == too_many
    assert not core.read_namespaced_pod("w-0", kube.namespace).metadata.deletion_timestamp
    played.settle_budget(kube.client(), kube.namespace, "agents", disruptions_allowed=1)
    evict("w-0", kube.namespace, eviction("w-0"))
    assert core.read_namespaced_pod("w-0", kube.namespace).metadata.deletion_timestamp
    assert refused(evict, "w-1", kube.namespace, eviction("w-1")) == too_many


def test_a_budget_does_not_keep_a_running_pod_that_is_not_ready(
    kube: Kube, core: client.CoreV1Api
) -> None:
    # As the pods of a node that fell silent.
    running(kube, "w-0")
    make_budget(kube)
    played.settle_budget(kube.client(), kube.namespace, "agents", disruptions_allowed=0)
    played.run(kube.client(), kube.namespace, "w-0", is_ready=False)
    core.create_namespaced_pod_eviction("w-0", kube.namespace, eviction("w-0"))
    assert core.read_namespaced_pod("w-0", kube.namespace).metadata.deletion_timestamp


def test_a_budget_does_not_keep_a_pod_that_does_not_run(kube: Kube, core: client.CoreV1Api) -> None:
    make_budget(kube)
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    core.create_namespaced_pod_eviction("w-0", kube.namespace, eviction("w-0"))
    assert refused(core.read_namespaced_pod, "w-0", kube.namespace) == NOT_FOUND


def test_two_budgets_on_a_pod_are_an_error(kube: Kube, core: client.CoreV1Api) -> None:
    running(kube, "w-0")
    make_budget(kube, "one")
    make_budget(kube, "two")
    call = (core.create_namespaced_pod_eviction, "w-0", kube.namespace, eviction("w-0"))
    assert refused(*call) == (500, "")


def test_a_deletion_passes_the_budget_by(kube: Kube, core: client.CoreV1Api) -> None:
    running(kube, "w-0")
    make_budget(kube)
    core.delete_namespaced_pod("w-0", kube.namespace, grace_period_seconds=0)
    assert refused(core.read_namespaced_pod, "w-0", kube.namespace) == NOT_FOUND
