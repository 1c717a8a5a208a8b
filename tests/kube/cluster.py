"""What a test of the Kubernetes side gets: a server, users, and a namespace of its own."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

from kubernetes import client

from tests.kube.manifests import CONTROLLER, DEFINITION, documents, granted, rights
from tests.kube.request import Request


class Server(Protocol):
    """A Kubernetes API server that a test may talk to."""

    @property
    def url(self) -> str:
        """Where it listens."""

    @property
    def ca(self) -> Path | None:
        """The certificate to trust; None where it speaks plain HTTP."""

    @property
    def admin_token(self) -> str:
        """For a user who may do everything."""

    def requests(self) -> list[Request]:
        """Everything that was asked for so far, oldest first."""

    def freeze(self) -> None:
        """Accept requests and answer none, watches included, until `thaw`."""

    def thaw(self) -> None:
        """Answer again."""

    def drop_connections(self) -> None:
        """Break every connection, as the death of a server does; all objects stay."""

    def forget_changes(self) -> None:
        """Watches of the past get 410."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kube:
    """One test's view of a server."""

    kind: str
    """fake or real."""
    server: Server
    namespace: str
    """Fresh, and all that the controller has rights in, nodes apart."""
    controller_token: str
    """For the service account of deploy/kubernetes, with exactly its rights."""
    clients: list[client.ApiClient] = field(default_factory=list)
    """Handed out so far."""

    @property
    def url(self) -> str:
        """Where the server listens."""
        return self.server.url

    @property
    def ca(self) -> Path | None:
        """The certificate to trust; None where the server speaks plain HTTP."""
        return self.server.ca

    @property
    def admin_token(self) -> str:
        """For a user who may do everything."""
        return self.server.admin_token

    @property
    def controller_user(self) -> str:
        """The controller's user name, as the server's records spell it."""
        return f"system:serviceaccount:{self.namespace}:{CONTROLLER}"

    def client(self, token: str | None = None) -> client.ApiClient:
        """A client for a token, an administrator's by default; closed with the test."""
        made = connect(self.server, token or self.admin_token)
        self.clients.append(made)
        return made

    def core(self, token: str | None = None) -> client.CoreV1Api:
        """The core API for a token, an administrator's by default."""
        return client.CoreV1Api(self.client(token))

    def write_config(self, path: Path, token: str | None = None) -> Path:
        """A kubeconfig for a token, that of the controller's service account by default."""
        cluster: dict[str, Any] = {"server": self.url}
        if self.ca is not None:
            cluster["certificate-authority"] = str(self.ca)
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token or self.controller_token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        path.write_text(json.dumps(document))
        return path

    def controller_requests(self) -> set[Request]:
        """What the controller of this namespace has asked for, refusals included."""
        return {asked for asked in self.server.requests() if asked.user == self.controller_user}

    def unused_rights(self) -> set[tuple[str, str]]:
        """Verb and resource of what the controller may do and has not done."""
        return granted() - {(asked.verb, asked.resource) for asked in self.controller_requests()}

    def missing_rights(self) -> set[tuple[str, str]]:
        """Verb and resource of what the controller wanted to do and may not."""
        asked = self.controller_requests()
        return {(one.verb, one.resource) for one in asked if not one.is_allowed}


def connect(server: Server, token: str) -> client.ApiClient:
    """A client of the official library, without its silent retries."""
    configuration = client.Configuration(host=server.url)
    configuration.ssl_ca_cert = None if server.ca is None else str(server.ca)
    configuration.api_key = {"authorization": f"Bearer {token}"}
    configuration.retries = 0
    return client.ApiClient(configuration)


@contextmanager
def opened(kind: str, server: Server) -> Iterator[Kube]:
    """A fresh namespace on a server, with the controller's account and its rights, for a while."""
    namespace = f"test-{uuid.uuid4().hex[:8]}"
    api = connect(server, server.admin_token)
    try:
        if kind == "real":
            _define_training_jobs(api)
        token = _set_up(api, namespace)
        kube = Kube(kind=kind, server=server, namespace=namespace, controller_token=token)
        try:
            yield kube
        finally:
            for made in kube.clients:
                made.close()
            _clean_up(api, namespace)
    finally:
        api.close()


def _set_up(api: client.ApiClient, namespace: str) -> str:
    """Make what the controller needs before it starts; the token of its account."""
    core = client.CoreV1Api(api)
    core.create_namespace({"metadata": {"name": namespace}})
    rbac = client.RbacAuthorizationV1Api(api)
    for document in rights(namespace):
        match document["kind"]:
            case "ServiceAccount":
                core.create_namespaced_service_account(namespace, document)
            case "Role":
                rbac.create_namespaced_role(namespace, document)
            case "RoleBinding":
                rbac.create_namespaced_role_binding(namespace, document)
            case "ClusterRole":
                rbac.create_cluster_role(document)
            case "ClusterRoleBinding":
                rbac.create_cluster_role_binding(document)
    lifetime = {"spec": {"audiences": [], "expirationSeconds": 7200}}
    issued = core.create_namespaced_service_account_token(CONTROLLER, namespace, lifetime)
    return str(issued.status.token)


def _define_training_jobs(api: client.ApiClient) -> None:
    """Have the server know them; once for all namespaces."""
    (definition,) = (each for each in documents() if each["kind"] == DEFINITION)
    extensions = client.ApiextensionsV1Api(api)
    name = definition["metadata"]["name"]
    try:
        extensions.create_custom_resource_definition(definition)
    except client.ApiException as error:
        if error.status != HTTPStatus.CONFLICT:
            raise
    deadline_s = time.monotonic() + 30.0
    while True:
        found: Any = extensions.read_custom_resource_definition(name)
        conditions = {each.type: each.status for each in found.status.conditions or ()}
        if conditions.get("Established") == "True":
            return
        assert time.monotonic() < deadline_s, conditions
        time.sleep(0.05)


def _clean_up(api: client.ApiClient, namespace: str) -> None:
    """Take away what outlives a namespace, or would be seen from others."""
    core = client.CoreV1Api(api)
    core.delete_collection_namespaced_pod(namespace, grace_period_seconds=0)
    core.delete_collection_node()
    core.delete_namespace(namespace)
    rbac = client.RbacAuthorizationV1Api(api)
    ours = f"test-namespace={namespace}"
    rbac.delete_collection_cluster_role_binding(label_selector=ours)
    rbac.delete_collection_cluster_role(label_selector=ours)
