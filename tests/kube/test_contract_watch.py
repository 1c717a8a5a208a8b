"""What the adapter relies on in watches and in a server that fails, asked of both servers."""

from __future__ import annotations

import pytest
import urllib3
from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from tests.kube.asked import (
    events,
    pod,
    running,
)
from tests.kube.cluster import Kube

# Watches.


def test_a_watch_tells_what_happened_since_a_version(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    version = core.list_namespaced_pod(kube.namespace).metadata.resource_version
    running(kube, "w-1")
    core.patch_namespaced_pod("w-0", kube.namespace, {"metadata": {"labels": {"seen": "yes"}}})
    core.delete_namespaced_pod("w-0", kube.namespace)
    seen = events(core.list_namespaced_pod, kube.namespace, resource_version=version)
    assert seen == [
        ("ADDED", "w-1"),
        ("MODIFIED", "w-1"),
        ("MODIFIED", "w-0"),
        # Marked for deletion.
        ("MODIFIED", "w-0"),
        ("DELETED", "w-0"),
    ]


def test_a_watch_without_a_version_begins_with_what_is_there(
    kube: Kube, core: client.CoreV1Api
) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    assert events(core.list_namespaced_pod, kube.namespace) == [("ADDED", "w-0")]


def test_a_watch_tells_what_happens_now(kube: Kube, core: client.CoreV1Api) -> None:
    version = core.list_namespaced_pod(kube.namespace).metadata.resource_version
    watching = watch.Watch()
    # A client of its own: the watch keeps the only connection of another busy.
    stream = watching.stream(
        kube.core().list_namespaced_pod,
        kube.namespace,
        resource_version=version,
        timeout_seconds=20,
    )
    for name in ("w-0", "w-1"):
        core.create_namespaced_pod(kube.namespace, pod(name))
        event = next(stream)
        assert (event["type"], event["object"].metadata.name) == ("ADDED", name)
    stream.close()


def test_a_watch_sees_pods_come_and_go_with_their_labels(
    kube: Kube, core: client.CoreV1Api
) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    version = core.list_namespaced_pod(kube.namespace).metadata.resource_version
    for value in ("mine", "theirs"):
        change = {"metadata": {"labels": {"owner": value}}}
        core.patch_namespaced_pod("w-0", kube.namespace, change)
    seen = events(
        core.list_namespaced_pod,
        kube.namespace,
        resource_version=version,
        label_selector="owner=mine",
    )
    assert seen == [("ADDED", "w-0"), ("DELETED", "w-0")]


def test_a_removed_pod_is_told_with_the_version_of_its_removal(
    kube: Kube, core: client.CoreV1Api
) -> None:
    made = core.create_namespaced_pod(kube.namespace, pod("w-0"))
    version = made.metadata.resource_version
    core.delete_namespaced_pod("w-0", kube.namespace)
    stream = watch.Watch().stream(
        core.list_namespaced_pod, kube.namespace, resource_version=version, timeout_seconds=1
    )
    marked, removed = list(stream)
    assert marked["type"] == "MODIFIED"
    assert marked["object"].metadata.deletion_timestamp
    assert removed["type"] == "DELETED"
    assert removed["object"].metadata.uid == made.metadata.uid
    versions = [int(event["object"].metadata.resource_version) for event in (marked, removed)]
    assert int(version) < versions[0] < versions[1]


def test_a_version_that_is_forgotten_is_gone(kube: Kube, core: client.CoreV1Api) -> None:
    version = core.list_namespaced_pod(kube.namespace).metadata.resource_version
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    kube.server.forget_changes()
    stream = watch.Watch().stream(
        core.list_namespaced_pod, kube.namespace, resource_version=version, timeout_seconds=5
    )
    with pytest.raises(ApiException) as caught:
        next(stream)
    assert caught.value.status == 410


def test_the_server_ends_a_watch_in_time_and_cleanly(kube: Kube, core: client.CoreV1Api) -> None:
    version = core.list_namespaced_pod(kube.namespace).metadata.resource_version
    answer = core.list_namespaced_pod(
        kube.namespace,
        watch=True,
        resource_version=version,
        timeout_seconds=1,
        allow_watch_bookmarks=True,
        _preload_content=False,
    )
    kinds = {line.split(b'"')[3] for line in answer.data.splitlines()}
    assert answer.status == 200
    assert kinds <= {b"BOOKMARK"}


# The server itself.


def test_an_answer_that_does_not_come_is_a_timeout(kube: Kube) -> None:
    patient = kube.core()
    patient.read_namespace(kube.namespace)
    kube.server.freeze()
    try:
        with pytest.raises(urllib3.exceptions.HTTPError):
            patient.read_namespace(kube.namespace, _request_timeout=0.5)
    finally:
        kube.server.thaw()
    assert patient.read_namespace(kube.namespace).metadata.name == kube.namespace


def test_objects_outlive_the_connections(kube: Kube, core: client.CoreV1Api) -> None:
    core.create_namespaced_pod(kube.namespace, pod("w-0"))
    stream = watch.Watch().stream(
        kube.core().list_namespaced_pod, kube.namespace, timeout_seconds=60
    )
    assert next(stream)["type"] == "ADDED"
    kube.server.drop_connections()
    with pytest.raises(urllib3.exceptions.HTTPError):
        next(stream)
    left = kube.core().list_namespaced_pod(kube.namespace).items
    assert [item.metadata.name for item in left] == ["w-0"]
