"""What the in-memory server can do beyond the real one: fail on demand, be old, forget soon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import urllib3
from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from tests.kube.asked import NOT_FOUND, eviction, pod, refused, running
from tests.kube.cluster import Kube, opened
from tests.kube.fake import FakeKube
from tests.kube.fake.errors import ApiError


@pytest.fixture
def fake() -> Iterator[Kube]:
    with FakeKube(num_changes=20) as server, opened("fake", server) as kube:
        yield kube


@pytest.fixture
def old() -> Iterator[Kube]:
    """As Kubernetes before 1.21 serves budgets and evictions."""
    with FakeKube(policy_version="v1beta1") as server, opened("fake", server) as kube:
        yield kube


def test_requests_are_refused_as_often_as_told(fake: Kube) -> None:
    overload = ApiError(429, "TooManyRequests", "too many requests", retry_after_s=1)
    fake.server.faults.refuse("create", "pods", overload, times=2)
    core = fake.core()
    for _ in range(2):
        with pytest.raises(ApiException) as caught:
            core.create_namespaced_pod(fake.namespace, pod("w-0"))
        assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "1")
    assert core.list_namespaced_pod(fake.namespace).items == []
    core.create_namespaced_pod(fake.namespace, pod("w-0"))


def test_a_request_whose_answer_is_lost_was_done(fake: Kube) -> None:
    fake.server.faults.lose_answers("create", "pods")
    core = fake.core()
    with pytest.raises(urllib3.exceptions.HTTPError):
        core.create_namespaced_pod(fake.namespace, pod("w-0"))
    assert core.read_namespaced_pod("w-0", fake.namespace).metadata.name == "w-0"


def test_changes_are_forgotten_when_there_are_many(fake: Kube) -> None:
    core = fake.core()
    version = core.list_namespaced_pod(fake.namespace).metadata.resource_version
    for number in range(21):
        core.create_namespaced_config_map(fake.namespace, {"metadata": {"name": f"a-{number}"}})
    with pytest.raises(ApiException) as caught:
        next(
            watch.Watch().stream(
                core.list_namespaced_pod,
                fake.namespace,
                resource_version=version,
                timeout_seconds=5,
            )
        )
    assert caught.value.status == 410


def test_a_watch_gets_bookmarks_when_it_asks(fake: Kube) -> None:
    core = fake.core()
    version = core.list_namespaced_pod(fake.namespace).metadata.resource_version
    core.create_namespaced_config_map(fake.namespace, {"metadata": {"name": "a"}})
    stream = watch.Watch().stream(
        core.list_namespaced_pod,
        fake.namespace,
        resource_version=version,
        allow_watch_bookmarks=True,
        timeout_seconds=20,
    )
    event = next(stream)
    stream.close()
    assert event["type"] == "BOOKMARK"
    # Of nothing that the watch is about, and later all the same.
    assert int(event["raw_object"]["metadata"]["resourceVersion"]) > int(version)


def test_what_the_fake_does_not_know_is_refused(fake: Kube) -> None:
    core = fake.core()
    with pytest.raises(ApiException) as caught:
        core.create_namespaced_pod(fake.namespace, pod("w-0"), dry_run="All")
    assert caught.value.status == 400
    assert refused(core.read_namespaced_pod, "w-0", fake.namespace) == NOT_FOUND


def test_an_old_server_knows_the_old_version_of_evictions_only(old: Kube) -> None:
    running(old, "w-0")
    core = old.core()
    new = {**eviction("w-0"), "apiVersion": "policy/v1"}
    with pytest.raises(ApiException) as caught:
        core.create_namespaced_pod_eviction("w-0", old.namespace, new)
    assert caught.value.status == 400
    known = {**eviction("w-0"), "apiVersion": "policy/v1beta1"}
    core.create_namespaced_pod_eviction("w-0", old.namespace, known)
    budgets = client.PolicyV1Api(old.client()).list_namespaced_pod_disruption_budget
    assert refused(budgets, old.namespace) == NOT_FOUND
