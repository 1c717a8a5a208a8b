"""Single calls of the API server: whose objects they touch, and how answers are read."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes import config as loading

from controller.kube import objects
from controller.kube.api import KubeApi
from controller.kube.config import KubeConfig
from controller.kube.errors import (
    ConflictError,
    ForbiddenError,
    NoClusterError,
    RefusedError,
    UnreachableError,
)
from tests.kube.cluster import Kube
from tests.kube.fleets import HURRIED, Fleet
from tests.kube.views import CONFIG

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def api(kube: Kube, tmp_path: Path) -> KubeApi:
    async def config() -> KubeConfig:
        return Fleet(kube, tmp_path).config

    return KubeApi(asyncio.run(config()))


def test_label_is_for_exactly_the_pod_that_was_meant(kube: Kube, api: KubeApi) -> None:
    containers = [{"name": "agent", "image": "outlast:test"}]
    made = api.create_pod({"metadata": {"name": "agent-0"}, "spec": {"containers": containers}})
    with pytest.raises(ConflictError):
        api.label_pod("agent-0", "another-uid", "gpt-1")
    read = kube.core().read_namespaced_pod
    assert not read("agent-0", kube.namespace).metadata.labels
    api.label_pod("agent-0", made["metadata"]["uid"], "gpt-1")
    assert read("agent-0", kube.namespace).metadata.labels == {"outlast.dev/job": "gpt-1"}


@pytest.mark.parametrize("kind", ["config map", "service"])
def test_object_of_somebody_else_is_neither_used_nor_deleted(
    kube: Kube, api: KubeApi, kind: str
) -> None:
    core = kube.core()
    if kind == "config map":
        theirs: dict[str, Any] = {"metadata": {"name": "outlast-anchor"}, "data": {"their": "own"}}
        core.create_namespaced_config_map(kube.namespace, theirs)
    else:
        theirs = {"metadata": {"name": "outlast-agents"}, "spec": {"ports": [{"port": 80}]}}
        core.create_namespaced_service(kube.namespace, theirs)
    with pytest.raises(RefusedError, match=r"is not ours.*--kube-fleet"):
        api.make_base()
    api.remove_base()
    kept = [
        *core.list_namespaced_config_map(kube.namespace).items,
        *core.list_namespaced_service(kube.namespace).items,
    ]
    assert theirs["metadata"]["name"] in [item.metadata.name for item in kept]


def test_base_is_found_again_and_removed(kube: Kube, api: KubeApi) -> None:
    assert api.make_base() == api.make_base()
    api.remove_base()
    # Nothing is left to remove.
    api.remove_base()
    assert not kube.core().list_namespaced_service(kube.namespace).items


# Answers

HEAD = b"HTTP/1.1 %d Any\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@contextmanager
def answering(play: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that lets `play` answer its first request; its address."""

    def serve() -> None:
        with listening.accept()[0] as link:
            link.recv(65_536)
            play(link)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(30)


def connected(url: str, folder: Path, request_s: float = 5.0) -> KubeApi:
    path = folder / "kubeconfig"
    document = {
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": "any"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path.write_text(json.dumps(document))
    patience = replace(HURRIED, request_s=request_s)
    return KubeApi(replace(CONFIG, config_file=path, patience=patience))


@pytest.mark.parametrize("status", [200, 500])
def test_answer_that_only_drips_ends_at_the_deadline(tmp_path: Path, status: int) -> None:
    """Each byte comes in time; all of them would take for ever."""

    def drip(link: socket.socket) -> None:
        link.sendall(HEAD % (status, 1_000_000))
        link.settimeout(30)
        try:
            while not given_up.wait(0.05):
                link.sendall(b" ")
        except OSError:
            return

    given_up = threading.Event()
    with answering(drip) as url:
        api = connected(url, tmp_path, request_s=0.5)
        with pytest.raises(UnreachableError, match="too long"):
            api.make_base()
        given_up.set()


@pytest.mark.parametrize(
    ("message", "kind", "blames_rights"),
    [
        ('pods is forbidden: User "x" cannot create resource "pods"', ForbiddenError, True),
        ('pods "agent-0" is forbidden: exceeded quota: gpus', RefusedError, False),
        ('admission webhook "policy" denied the request: no', RefusedError, False),
    ],
)
def test_only_missing_rights_are_called_missing_rights(
    tmp_path: Path, message: str, kind: type[Exception], blames_rights: bool
) -> None:
    body = json.dumps({"kind": "Status", "reason": "Forbidden", "message": message}).encode()
    answer = HEAD % (403, len(body)) + body
    with answering(lambda link: link.sendall(answer)) as url, pytest.raises(kind) as caught:
        connected(url, tmp_path).create_pod({})
    assert message in str(caught.value)
    assert ("deploy/kubernetes" in str(caught.value)) is blames_rights


# Credentials


def test_credentials_that_cannot_be_renewed_are_tried_again(
    api: KubeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expired(_: object) -> None:
        raise loading.ConfigException("the token file is empty")

    monkeypatch.setattr(api._client.configuration, "refresh_api_key_hook", expired)
    with pytest.raises(UnreachableError, match="the token file is empty"):
        api.list(api.pods)


def test_default_kubeconfig_is_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def load(**given: Any) -> None:
        asked.append(given)
        raise loading.ConfigException("none here")

    monkeypatch.setattr("controller.kube.api.config.load_incluster_config", load)
    monkeypatch.setattr("controller.kube.api.config.load_kube_config", load)
    with pytest.raises(NoClusterError):
        KubeApi(CONFIG)
    assert asked[-1]["persist_config"] is False


def test_name_alone_makes_nothing_ours() -> None:
    anchor = objects.anchor(CONFIG)
    assert objects.is_ours(anchor, CONFIG.fleet)
    assert not objects.is_ours(anchor, "another")
    assert not objects.is_ours({"metadata": {"name": "outlast-anchor"}}, CONFIG.fleet)
