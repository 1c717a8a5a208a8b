"""The thin edge over the official client: calls with deadlines, plain objects, our own errors.

Only the client's configuration, credentials and transport are used. Its models
refuse what they do not know, and a controller must read objects of newer servers;
its retries multiply every timeout by four. So each call here is one request with
one deadline, which holds for silence and for an answer that only drips, and answers
are plain JSON objects. All of it blocks, and many threads may call at the same time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from controller.kube import objects, training_job
from controller.kube.config import KubeConfig
from controller.kube.errors import (
    ConflictError,
    NoClusterError,
    NotFoundError,
    RefusedError,
    UnreachableError,
    error_of,
    status_of,
)
from controller.kube.observed import Json

_MERGE_PATCH = "application/merge-patch+json"
# Newest first. A server before 1.22 answers 400 or 404 to the first.
_EVICTION_VERSIONS = ("policy/v1", "policy/v1beta1")
_BAD_REQUEST, _CONFLICT = 400, 409
_CHUNK_BYTES = 65_536
_PAGE = 500
_CONNECT_S = 5.0
# Watches have a connection each, besides the calls.
_WATCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Everything of a kind, and the version from which a watch goes on."""

    items: tuple[Json, ...]
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is listed and watched."""

    name: str
    path: str
    selector: str = ""


class WatchStream:
    """Events of a kind as they come; ends when the server says so."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __iter__(self) -> Iterator[Json]:
        """Each event as `{"type": …, "object": …}`.

        Raises:
            ExpiredError: the version is too old.
            UnreachableError: the link is dead, or was silent for too long.
            KubeError: the server gave up.
        """
        rest = b""
        try:
            for chunk in self._response.stream(amt=None):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise error_of(status.get("code", 0), status, "watch", None)
                    yield event
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise UnreachableError(f"watch: {error}") from error
        finally:
            self._response.close()

    def end(self) -> None:
        """Make a thread that waits in the iterator come back."""
        try:
            self._response.shutdown()
        except (OSError, ValueError, RuntimeError):
            # It has ended by itself.
            return


class KubeApi:
    """One API server, as the controller uses it."""

    def __init__(self, config: KubeConfig) -> None:
        self._config = config
        self._timeout_s = config.patience.request_s
        self._client: Any = _connect(config)
        self._eviction_version = _EVICTION_VERSIONS[0]
        base = f"/api/v1/namespaces/{config.namespace}"
        self._pods = f"{base}/pods"
        self._services = f"{base}/services"
        self._config_maps = f"{base}/configmaps"
        self.pods = Kind(name="pods", path=self._pods, selector=objects.selector(config.fleet))
        self.hosts = Kind(name="nodes", path="/api/v1/nodes")
        self._events = f"{base}/events"
        group = f"/apis/{training_job.GROUP}/{training_job.VERSION}"
        place = f"{group}/namespaces/{config.namespace}/{training_job.PLURAL}"
        self.training_jobs = Kind(name=training_job.PLURAL, path=place)

    def close(self) -> None:
        self._client.rest_client.close()

    def list(self, kind: Kind) -> Listing:
        """Everything of a kind, read from a quorum."""
        items: list[Json] = []
        query = {"limit": str(_PAGE)}
        if kind.selector:
            query["labelSelector"] = kind.selector
        while True:
            page = self._call("GET", kind.path, query=query)
            items += page.get("items") or ()
            token = page["metadata"].get("continue")
            if not token:
                return Listing(items=tuple(items), version=page["metadata"]["resourceVersion"])
            query["continue"] = token

    def watch(self, kind: Kind, version: str) -> WatchStream:
        """What happens to a kind after a version, until the server ends it.

        The server sends bookmarks and ends the watch itself, so silence for longer
        than that means a dead link.
        """
        patience = self._config.patience
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(max(1, round(patience.watch_s))),
        }
        if kind.selector:
            query["labelSelector"] = kind.selector
        silence_s = patience.watch_s + patience.dead_link_s
        return WatchStream(
            self._open("GET", kind.path, query=query, timeout=(_CONNECT_S, silence_s))
        )

    def create_pod(self, manifest: Json) -> Json:
        """Make a pod; ConflictError when one of that name exists."""
        return self._call("POST", self._pods, body=manifest)

    def delete_pod(self, name: str, uid: str, grace_s: int | None = None) -> None:
        """Delete exactly this pod; it is well when it is not there any more."""
        try:
            self._call("DELETE", f"{self._pods}/{name}", body=objects.deletion(uid, grace_s))
        except (NotFoundError, ConflictError):
            # Gone, or another pod has the name by now.
            return

    def evict_pod(self, name: str, uid: str) -> None:
        """Have exactly this pod evicted.

        Raises:
            TooManyRequestsError: a disruption budget does not allow it now.
            NotFoundError, ConflictError: it is not there any more.
        """
        try:
            self._evict(name, uid, self._eviction_version)
        except (NotFoundError, RefusedError) as error:
            is_unknown = isinstance(error, NotFoundError) or error.status == _BAD_REQUEST
            if not is_unknown or self._eviction_version == _EVICTION_VERSIONS[-1]:
                raise
            self._evict(name, uid, _EVICTION_VERSIONS[-1])
            self._eviction_version = _EVICTION_VERSIONS[-1]

    def label_pod(self, name: str, uid: str, job: str) -> Json:
        """Say on exactly this pod whose workers it holds; ConflictError when it is another."""
        try:
            return self._patch(f"{self._pods}/{name}", objects.job_label_patch(uid, job))
        except RefusedError as error:
            # Kubernetes 1.20 calls another uid an attempt to change it.
            if error.status == HTTPStatus.UNPROCESSABLE_ENTITY and "metadata.uid" in str(error):
                raise ConflictError(str(error)) from error
            raise

    def patch_host(self, name: str, patch: Json) -> Json:
        """Change a host; ConflictError when it changed since it was read."""
        return self._patch(f"{self.hosts.path}/{name}", patch)

    def patch_training_job(self, name: str, status: Json) -> None:
        """Write the status of the object of this name; which one it is for must be in it."""
        self._patch(f"{self.training_jobs.path}/{name}/status", {"status": status})

    def create_event(self, event: Json) -> None:
        """Say what happened to an object."""
        self._call("POST", self._events, body=event)

    def make_base(self) -> str:
        """Have the anchor and the service of the fleet; the anchor's uid.

        Raises:
            RefusedError: somebody else's object has one of the names.
        """
        uid = self._have(self._config_maps, objects.anchor(self._config))
        self._have(self._services, objects.service(self._config, uid))
        return uid

    def remove_base(self) -> None:
        """Delete the service and the anchor, if they are ours."""
        fleet = self._config.fleet
        for path in (
            f"{self._services}/{objects.service_name(fleet)}",
            f"{self._config_maps}/{objects.anchor_name(fleet)}",
        ):
            with suppress(NotFoundError, ConflictError):
                found = self._call("GET", path)
                if objects.is_ours(found, fleet):
                    self._call("DELETE", path, body=objects.deletion(found["metadata"]["uid"]))

    def _have(self, path: str, manifest: Json) -> str:
        """Make an object unless it is there already; its uid."""
        try:
            made = self._call("POST", path, body=manifest)
        except ConflictError:
            name = manifest["metadata"]["name"]
            made = self._call("GET", f"{path}/{name}")
            if not objects.is_ours(made, self._config.fleet):
                raise RefusedError(
                    f"{manifest['kind']} {name} is there and is not ours; delete it, or take "
                    "another name with --kube-fleet",
                    status=_CONFLICT,
                ) from None
        return cast(str, made["metadata"]["uid"])

    def _evict(self, name: str, uid: str, version: str) -> None:
        body = objects.eviction(name, self._config.namespace, uid, version)
        self._call("POST", f"{self._pods}/{name}/eviction", body=body)

    def _patch(self, path: str, patch: Json) -> Json:
        return self._call("PATCH", path, body=patch, content_type=_MERGE_PATCH)

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """One request and its whole answer."""
        until_s = time.monotonic() + self._timeout_s
        response = self._open(
            method,
            path,
            query=query,
            body=body,
            content_type=content_type,
            timeout=(_CONNECT_S, self._timeout_s),
        )
        try:
            return cast(Json, json.loads(_read(response, until_s)))
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise UnreachableError(f"{method} {path}: {error}") from error
        finally:
            # It goes back for the next call when it was read to its end.
            response.release_conn()

    def _open(
        self,
        method: str,
        path: str,
        *,
        timeout: tuple[float, float],
        query: dict[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Any:
        """One request; its answer, of which only the head has been read."""
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            _, url, headers, body, _ = self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=timeout
            ).response
            if response.status < 400:
                return response
            data = _read(response, time.monotonic() + self._timeout_s)
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            raise UnreachableError(f"{method} {path}: {error}") from error
        except config.ConfigException as error:
            # Credentials are read anew when they expire.
            raise UnreachableError(f"{method} {path}: no credentials: {error}") from error
        raise error_of(response.status, status_of(data), f"{method} {path}", response.headers)


def _connect(given: KubeConfig) -> Any:
    """The client for a kubeconfig, the pod's own account, or the default kubeconfig."""
    # It reads proxies from the environment, as its users expect.
    configuration = client.Configuration()
    # The client's functions carry no types.
    load: Any = config
    try:
        if given.config_file is None:
            try:
                load.load_incluster_config(client_configuration=configuration)
            except config.ConfigException:
                load.load_kube_config(client_configuration=configuration, persist_config=False)
        else:
            load.load_kube_config(
                config_file=str(given.config_file),
                client_configuration=configuration,
                persist_config=False,
            )
    except (config.ConfigException, OSError, ValueError) as error:
        raise NoClusterError(
            f"no Kubernetes cluster: {error}; give a kubeconfig with --kube-config, "
            "or run the controller in a pod with a service account"
        ) from error
    # Retries of reads would make every deadline four times as long.
    configuration.retries = cast(Any, False)
    configuration.connection_pool_maxsize = given.max_parallel + _WATCHES
    return client.ApiClient(configuration)


def _read(response: Any, until_s: float) -> bytes:
    """A whole answer; UnreachableError when it is not there by then.

    A single read takes what there is, and no longer than the request's own timeout.
    """
    parts: list[bytes] = []
    while part := response.read1(_CHUNK_BYTES):
        parts.append(part)
        if time.monotonic() > until_s:
            response.close()
            raise UnreachableError("the answer took too long")
    return b"".join(parts)
