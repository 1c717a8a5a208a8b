"""What the adapter relies on, asked of both servers: the fake is only as good as these suites.

Here: objects and their versions, lists, nodes, services, owners and events.
"""

from __future__ import annotations

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from tests.kube import played
from tests.kube.asked import (
    ALREADY_EXISTS,
    CONFLICT,
    INVALID,
    MERGE,
    NOT_FOUND,
    Object,
    pod,
    refused,
    running,
)
from tests.kube.cluster import Kube

# Objects and their versions.


def test_a_created_object_gets_uid_version_and_time(kube: Kube, core: client.CoreV1Api) -> None:
    made = core.create_namespaced_config_map(kube.namespace, {"metadata": {"name": "anchor"}})
    assert made.metadata.uid
    assert made.metadata.resource_version
    assert made.metadata.creation_timestamp
    assert made.metadata.namespace == kube.namespace


def test_a_name_is_taken_once(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    assert refused(core.create_namespaced_pod, kube.namespace, pod("w-0")) == ALREADY_EXISTS


def test_a_name_that_is_used_again_has_another_uid(kube: Kube, core: client.CoreV1Api) -> None:
    first = core.create_namespaced_pod(kube.namespace, pod("w-0"))
    core.delete_namespaced_pod("w-0", kube.namespace)
    second = core.create_namespaced_pod(kube.namespace, pod("w-0"))
    assert first.metadata.uid != second.metadata.uid


def test_what_is_missing_is_not_found(kube: Kube, core: client.CoreV1Api) -> None:
    assert refused(core.read_namespaced_pod, "w-0", kube.namespace) == NOT_FOUND
    assert refused(core.patch_namespaced_pod, "w-0", kube.namespace, {}) == NOT_FOUND
    assert refused(core.delete_namespaced_pod, "w-0", kube.namespace) == NOT_FOUND
    assert refused(core.read_node, "node-z") == NOT_FOUND


def test_nothing_is_created_in_a_namespace_that_is_missing(core: client.CoreV1Api) -> None:
    assert refused(core.create_namespaced_pod, "nowhere", pod("w-0")) == NOT_FOUND


def test_names_may_be_generated(kube: Kube, core: client.CoreV1Api) -> None:
    body = {"metadata": {"generateName": "anchor-"}}
    names = {
        core.create_namespaced_config_map(kube.namespace, body).metadata.name for _ in range(2)
    }
    assert len(names) == 2
    assert all(name.startswith("anchor-") for name in names)


def test_a_stale_replace_conflicts(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    first = core.read_namespaced_pod("w-0", kube.namespace)
    second = core.read_namespaced_pod("w-0", kube.namespace)
    first.metadata.labels["seen"] = "by-first"
    core.replace_namespaced_pod("w-0", kube.namespace, first)
    second.metadata.labels["seen"] = "by-second"
    assert refused(core.replace_namespaced_pod, "w-0", kube.namespace, second) == CONFLICT


def test_a_patch_with_a_stale_version_conflicts(kube: Kube, core: client.CoreV1Api) -> None:
    played.add_node(kube.client(), "node-a")
    version = core.read_node("node-a").metadata.resource_version
    body = {"metadata": {"resourceVersion": version}, "spec": {"unschedulable": True}}
    core.patch_node("node-a", body, **MERGE)
    body["spec"] = {"unschedulable": None}
    assert refused(core.patch_node, "node-a", body, **MERGE) == CONFLICT
    assert core.read_node("node-a").spec.unschedulable


def test_a_patch_that_changes_nothing_makes_no_version(kube: Kube, core: client.CoreV1Api) -> None:
    played.add_node(kube.client(), "node-a")
    before = core.patch_node("node-a", {"spec": {"unschedulable": True}})
    after = core.patch_node("node-a", {"spec": {"unschedulable": True}})
    assert before.metadata.resource_version == after.metadata.resource_version


def test_versions_of_all_kinds_come_from_one_counter(kube: Kube, core: client.CoreV1Api) -> None:
    first = core.create_namespaced_config_map(kube.namespace, {"metadata": {"name": "a"}})
    second = core.create_namespaced_pod(kube.namespace, pod("w-0"))
    listed = core.list_namespaced_config_map(kube.namespace)
    assert int(first.metadata.resource_version) < int(second.metadata.resource_version)
    assert int(second.metadata.resource_version) <= int(listed.metadata.resource_version)


def test_a_lease_is_taken_by_one_of_two(kube: Kube) -> None:
    leases = client.CoordinationV1Api(kube.client())
    body = {
        "metadata": {"name": "leader"},
        "spec": {"holderIdentity": "", "leaseDurationSeconds": 15},
    }
    leases.create_namespaced_lease(kube.namespace, body)
    mine = leases.read_namespaced_lease("leader", kube.namespace)
    theirs = leases.read_namespaced_lease("leader", kube.namespace)
    mine.spec.holder_identity, theirs.spec.holder_identity = "me", "them"
    leases.replace_namespaced_lease("leader", kube.namespace, mine)
    assert refused(leases.replace_namespaced_lease, "leader", kube.namespace, theirs) == CONFLICT
    assert refused(leases.replace_namespaced_lease, "leader", kube.namespace, body) == INVALID


# Lists.


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("app.kubernetes.io/name=outlast", ["w-0", "w-1", "w-2"]),
        ("app.kubernetes.io/name=outlast,outlast.dev/index=1", ["w-1"]),
        ("outlast.dev/index!=1", ["w-0", "w-2"]),
        ("outlast.dev/index in (0, 2)", ["w-0", "w-2"]),
        ("outlast.dev/index notin (0,2)", ["w-1"]),
        ("outlast.dev/index", ["w-0", "w-1", "w-2"]),
        ("!outlast.dev/index", []),
    ],
)
def test_lists_select_by_label(
    kube: Kube, core: client.CoreV1Api, selector: str, names: list[str]
) -> None:
    for name in ("w-0", "w-1", "w-2"):
        core.create_namespaced_pod(kube.namespace, pod(name))
    found = core.list_namespaced_pod(kube.namespace, label_selector=selector).items
    assert [item.metadata.name for item in found] == names


def test_lists_select_by_field(kube: Kube, core: client.CoreV1Api) -> None:
    running(kube, "w-0", "node-a")
    core.create_namespaced_pod(kube.namespace, pod("w-1", node="node-b"))

    def found(selector: str) -> list[str]:
        listed = core.list_namespaced_pod(kube.namespace, field_selector=selector).items
        return [item.metadata.name for item in listed]

    assert found("spec.nodeName=node-b") == ["w-1"]
    assert found("status.phase=Running") == ["w-0"]
    assert found("status.phase!=Running,metadata.name=w-1") == ["w-1"]
    with pytest.raises(ApiException) as caught:
        found("spec.image=outlast")
    assert caught.value.status == 400


def test_a_list_comes_in_chunks(kube: Kube, core: client.CoreV1Api) -> None:
    for number in range(5):
        core.create_namespaced_config_map(kube.namespace, {"metadata": {"name": f"a-{number}"}})
    first = core.list_namespaced_config_map(kube.namespace, limit=2)
    assert first.metadata.remaining_item_count == 3
    # Written after the list began, so that no later chunk has it.
    core.create_namespaced_config_map(kube.namespace, {"metadata": {"name": "a-9"}})
    rest = core.list_namespaced_config_map(
        kube.namespace, limit=9, _continue=first.metadata._continue
    )
    names = [item.metadata.name for item in first.items + rest.items]
    assert names == [f"a-{number}" for number in range(5)]
    assert rest.metadata.resource_version == first.metadata.resource_version
    assert not rest.metadata._continue


def test_a_list_of_another_namespace_has_none_of_ours(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    assert core.list_namespaced_pod("default").items == []
    everywhere = core.list_pod_for_all_namespaces().items
    assert ("w-0", kube.namespace) in [
        (item.metadata.name, item.metadata.namespace) for item in everywhere
    ]


# Nodes.


def test_a_node_starts_with_the_taint_of_one_that_is_not_ready(core: client.CoreV1Api) -> None:
    made = core.create_node({"metadata": {"name": "node-a"}})
    assert [(taint.key, taint.effect) for taint in made.spec.taints] == [
        (played.NOT_READY, "NoSchedule")
    ]


def test_conditions_are_merged_by_type(kube: Kube, core: client.CoreV1Api) -> None:
    played.add_node(kube.client(), "node-a")
    sick = {"type": "GpuHealthy", "status": "False", "reason": "Xid79"}
    core.patch_node_status("node-a", {"status": {"conditions": [sick]}})
    played.set_ready(kube.client(), "node-a", is_ready=False)
    found = {item.type: item.status for item in core.read_node("node-a").status.conditions}
    assert found == {"Ready": "Unknown", "GpuHealthy": "False"}


def test_taints_are_replaced_as_a_whole(kube: Kube, core: client.CoreV1Api) -> None:
    played.add_node(kube.client(), "node-a")
    for key in ("theirs", "outlast.dev/fault"):
        taint = {"key": key, "value": "xid", "effect": "NoSchedule"}
        core.patch_node("node-a", {"spec": {"taints": [taint]}})
    assert [taint.key for taint in core.read_node("node-a").spec.taints] == ["outlast.dev/fault"]
    twice = {"spec": {"taints": [taint, taint]}}
    assert refused(core.patch_node, "node-a", twice, **MERGE) == INVALID
    odd = {"spec": {"taints": [{"key": "a", "effect": "Never"}]}}
    assert refused(core.patch_node, "node-a", odd, **MERGE) == INVALID


def test_a_quarantine_is_one_patch_and_one_patch_takes_it_back(
    kube: Kube, core: client.CoreV1Api
) -> None:
    played.add_node(kube.client(), "node-a")
    before = core.read_node("node-a")
    quarantine = {
        "metadata": {
            "resourceVersion": before.metadata.resource_version,
            "annotations": {"outlast.dev/session": "incident-1"},
        },
        "spec": {
            "unschedulable": True,
            "taints": [{"key": "outlast.dev/fault", "effect": "NoSchedule"}],
        },
    }
    closed = core.patch_node("node-a", quarantine, **MERGE)
    assert closed.spec.unschedulable
    assert closed.metadata.annotations == {"outlast.dev/session": "incident-1"}
    release = {
        "metadata": {
            "resourceVersion": closed.metadata.resource_version,
            "annotations": {"outlast.dev/session": None},
        },
        "spec": {"unschedulable": None, "taints": None},
    }
    after = core.patch_node("node-a", release, **MERGE)
    assert after.spec.unschedulable is None
    assert after.spec.taints is None
    assert not after.metadata.annotations


# Services, owners and events.


def test_a_headless_service_publishes_agents_that_are_not_ready(
    kube: Kube, core: client.CoreV1Api
) -> None:
    body = {
        "metadata": {"name": "agents"},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app.kubernetes.io/name": "outlast"},
        },
    }
    made = core.create_namespaced_service(kube.namespace, body)
    assert made.spec.cluster_ip == "None"
    assert made.spec.publish_not_ready_addresses
    assert refused(core.create_namespaced_service, kube.namespace, body) == ALREADY_EXISTS
    # The answer is a Status here and the service on newer servers: the client knows the latter.
    core.delete_namespaced_service("agents", kube.namespace, _preload_content=False)
    assert refused(core.read_namespaced_service, "agents", kube.namespace) == NOT_FOUND


def test_what_an_anchor_owns_can_be_collected(kube: Kube, core: client.CoreV1Api) -> None:
    anchor = core.create_namespaced_config_map(kube.namespace, {"metadata": {"name": "anchor"}})
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "anchor"}
    owned = pod("w-0")
    owned["metadata"]["ownerReferences"] = [owner | {"uid": anchor.metadata.uid}]
    core.create_namespaced_pod(kube.namespace, owned)
    core.create_namespaced_pod(kube.namespace, pod("w-1"))
    service = {
        "metadata": {"name": "agents", "ownerReferences": owned["metadata"]["ownerReferences"]},
        "spec": {"clusterIP": "None"},
    }
    core.create_namespaced_service(kube.namespace, service)
    core.delete_namespaced_config_map(
        "anchor", kube.namespace, body={"propagationPolicy": "Background"}
    )
    played.collect_garbage(kube.client(), kube.namespace)
    assert core.list_namespaced_service(kube.namespace).items == []
    left = core.list_namespaced_pod(kube.namespace).items
    assert [item.metadata.name for item in left] == ["w-1"]


def test_an_owner_without_a_uid_is_invalid(kube: Kube, core: client.CoreV1Api) -> None:
    body = pod("w-0")
    body["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "anchor", "uid": ""}
    ]
    assert refused(core.create_namespaced_pod, kube.namespace, body) == INVALID


def test_a_foreground_deletion_waits_for_a_collector(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_config_map(kube.namespace, {"metadata": {"name": "anchor"}})
    core.delete_namespaced_config_map(
        "anchor", kube.namespace, body={"propagationPolicy": "Foreground"}
    )
    left = core.read_namespaced_config_map("anchor", kube.namespace).metadata
    assert left.finalizers == ["foregroundDeletion"]


def test_events_lie_where_their_object_lies(kube: Kube, core: client.CoreV1Api) -> None:
    def about(namespace: str | None, kind: str = "Pod") -> Object:
        return {
            "metadata": {"generateName": "outlast-"},
            "involvedObject": {"kind": kind, "name": "x", "namespace": namespace},
            "reason": "Quarantined",
            "message": "why",
            "type": "Warning",
        }

    core.create_namespaced_event(kube.namespace, about(kube.namespace))
    elsewhere = about("default")
    assert refused(core.create_namespaced_event, kube.namespace, elsewhere) == INVALID
    nowhere = about(None, "Node")
    assert refused(core.create_namespaced_event, kube.namespace, nowhere) == INVALID
    core.create_namespaced_event("default", nowhere)
    found = core.list_namespaced_event(kube.namespace, field_selector="reason=Quarantined").items
    assert [event.message for event in found] == ["why"]
