"""What deploy/kubernetes lets the controller do, asked of both servers."""

from __future__ import annotations

from kubernetes import client

from tests.kube import played
from tests.kube.asked import (
    FORBIDDEN,
    events,
    eviction,
    pod,
    refused,
    running,
)
from tests.kube.cluster import Kube
from tests.kube.manifests import CONTROLLER
from tests.kube.request import Request


def test_an_unknown_token_is_unauthorized(kube: Kube) -> None:
    assert refused(kube.core("nobody").list_namespaced_pod, kube.namespace) == (
        401,
        "Unauthorized",
    )


def test_the_controller_has_its_rights_in_its_namespace_only(kube: Kube) -> None:
    controller = kube.core(kube.controller_token)
    controller.create_namespaced_pod(kube.namespace, pod("w-0"))
    assert len(controller.list_namespaced_pod(kube.namespace).items) == 1
    assert refused(controller.create_namespaced_pod, "default", pod("w-0")) == FORBIDDEN
    assert refused(controller.list_pod_for_all_namespaces) == FORBIDDEN


def test_the_controller_may_patch_nodes_and_no_more(kube: Kube) -> None:
    played.add_node(kube.client(), "node-a")
    controller = kube.core(kube.controller_token)
    assert controller.patch_node("node-a", {"spec": {"unschedulable": True}}).spec.unschedulable
    assert refused(controller.delete_node, "node-a") == FORBIDDEN
    ready = {"status": {"conditions": []}}
    assert refused(controller.patch_node_status, "node-a", ready) == FORBIDDEN


def test_the_controller_sees_no_secrets_and_makes_no_roles(kube: Kube) -> None:
    controller = kube.client(kube.controller_token)
    secrets = client.CoreV1Api(controller).list_namespaced_secret
    assert refused(secrets, kube.namespace) == FORBIDDEN
    roles = client.RbacAuthorizationV1Api(controller)
    role = {"metadata": {"name": "more"}, "rules": []}
    assert refused(roles.create_namespaced_role, kube.namespace, role) == FORBIDDEN


def test_the_server_remembers_what_the_controller_asked_for(kube: Kube) -> None:
    controller = kube.core(kube.controller_token)
    running(kube, "w-0")
    events(controller.list_namespaced_pod, kube.namespace)
    controller.create_namespaced_pod_eviction("w-0", kube.namespace, eviction("w-0"))
    refused(controller.list_pod_for_all_namespaces)
    user = f"system:serviceaccount:{kube.namespace}:{CONTROLLER}"
    assert kube.controller_requests() == {
        Request(user, "watch", "pods"),
        Request(user, "create", "pods/eviction"),
        Request(user, "list", "pods", is_allowed=False),
    }
    assert kube.missing_rights() == {("list", "pods")}
    assert ("patch", "nodes") in kube.unused_rights()
