"""The adapter against an API server: it brings the cluster to where the machine wants it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from controller.core.changes import fold
from controller.core.node_events import NodeClosed, NodeGone, NodeUncordonRequested
from controller.kube import metrics, quarantine
from controller.kube.api import KubeApi
from controller.kube.errors import (
    ForbiddenError,
    NotFoundError,
    TooManyRequestsError,
    UnreachableError,
)
from outlast.ids import NodeId
from tests.kube.cluster import Kube
from tests.kube.fleets import HURRIED, Fleet, fleet

pytestmark = pytest.mark.timeout(120)

HOSTS = ("host-0", "host-1", "host-2")


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]  # a coroutine function


def annotations(host: Any) -> dict[str, str]:
    found = host.metadata.annotations or {}
    return {key: value for key, value in found.items() if key.startswith("outlast.dev/")}


def taints(host: Any) -> list[str]:
    return [taint.key for taint in host.spec.taints or ()]


def is_closed(host: Any) -> bool:
    return bool(host.spec.unschedulable) and quarantine.TAINT in taints(host)


def figure(it: Fleet, name: str, *labels: str) -> float:
    """A figure of the adapter's metrics; 0 where there is none."""
    for family in metrics.collect(it.cluster):
        for sample in family.samples:
            if sample.name == name and tuple(sample.labels.values()) == labels:
                return sample.value
    return 0.0


def forbid_disruption(kube: Kube) -> None:
    """A budget that allows no eviction, in the version that the server has."""
    custom = client.CustomObjectsApi(kube.client())
    for version in ("v1", "v1beta1"):
        budget = {
            "apiVersion": f"policy/{version}",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": "agents"},
            "spec": {
                "maxUnavailable": 0,
                "selector": {"matchLabels": {"app.kubernetes.io/component": "agent"}},
            },
        }
        arguments = ("policy", version, kube.namespace, "poddisruptionbudgets", budget)
        try:
            custom.create_namespaced_custom_object(*arguments)
        except client.ApiException as error:
            if error.status != 404:
                raise
        else:
            return


def test_job_gets_an_agent_on_each_host_and_leaves_nothing(kube: Kube, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(3)
            assert it.kubelets.hosts_in_use() == ["host-0", "host-1", "host-2"]
            labels = {"outlast.dev/job": "job", "app.kubernetes.io/instance": "outlast"}
            await it.until(
                lambda: all(labels.items() <= pod.metadata.labels.items() for pod in it.pods()),
                "pods to say whose they are",
            )
            assert [s.metadata.name for s in left(it)] == ["outlast-agents", "outlast-anchor"]
            it.cancel()
            it.driver.answer_all("/stop/")
            it.driver.answer_all("/forget/")
            it.driver.now_s += 61.0
            await it.until(lambda: not it.pods() and not left(it), "everything to be gone")
            assert {str(it.node(f"host-{n}").state) for n in range(3)} == {"RELEASED"}
            assert not any(annotations(it.host(f"host-{n}")) for n in range(3))

    def left(it: Fleet) -> list[Any]:
        names = it.core.list_namespaced_service(kube.namespace).items
        selector = "app.kubernetes.io/name=outlast"
        maps = it.core.list_namespaced_config_map(kube.namespace, label_selector=selector).items
        return [*names, *maps]

    play(scenario)


def test_pods_are_created_side_by_side(
    kube: Kube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, four would never meet."""
    meeting = threading.Barrier(4, timeout=20.0)
    create = KubeApi.create_pod

    def create_together(self: KubeApi, manifest: dict[str, Any]) -> dict[str, Any]:
        if not meeting.broken:
            meeting.wait()
        return create(self, manifest)

    monkeypatch.setattr(KubeApi, "create_pod", create_together)

    async def scenario() -> None:
        async with fleet(kube, tmp_path, hosts=4) as it:
            it.submit(nodes=4)
            await it.until(lambda: len(it.kubelets.hosts_in_use()) == 4, "four pods")
            assert not meeting.broken

    play(scenario)


def test_lost_host_is_closed_its_pod_evicted_and_replaced(kube: Kube, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(2)
            lost, kept = it.driver.job().nodes
            assert lost is not None
            await asyncio.to_thread(it.kubelets.fail, lost)
            await it.until(lambda: it.node(lost).state == "RETIRED", "the loss")
            await it.until(lambda: is_closed(it.host(lost)), "the quarantine")
            session = it.node(lost).quarantine
            assert annotations(it.host(lost))[quarantine.SESSION] == session
            it.driver.answer_all("/stop/")
            # The dead host confirms nothing, and the pod goes all the same.
            await it.until(
                lambda: (
                    it.kubelets.hosts_in_use() == sorted({"host-0", "host-1", "host-2"} - {lost})
                ),
                "a replacement on another host",
            )
            await it.until(lambda: len(it.pods()) == 2, "the dead pod to be removed")
            assert it.driver.job().nodes[1] == kept

    play(scenario)


def test_host_that_a_person_had_cordoned_stays_cordoned(kube: Kube, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(2)
            lost = it.driver.job().nodes[0]
            assert lost is not None
            it.core.patch_node(lost, {"spec": {"unschedulable": True}})
            await it.until(
                lambda: NodeClosed(node=lost, reason="its host is cordoned") in it.posted,
                "the cordon to be seen",
            )
            # Its job trains on there.
            assert it.node(lost).state == "ASSIGNED"
            await asyncio.to_thread(it.kubelets.fail, lost)
            await it.until(lambda: is_closed(it.host(lost)), "the quarantine")
            assert annotations(it.host(lost))[quarantine.PRIOR_CORDON] == "true"
            it.tell(NodeUncordonRequested(node=lost))
            await it.until(lambda: not annotations(it.host(lost)), "the release")
            assert it.host(lost).spec.unschedulable
            assert quarantine.TAINT not in taints(it.host(lost))

    play(scenario)


def test_uncordon_by_hand_ends_the_quarantine(kube: Kube, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(2)
            lost = it.driver.job().nodes[0]
            assert lost is not None
            await asyncio.to_thread(it.kubelets.fail, lost)
            await it.until(lambda: is_closed(it.host(lost)), "the quarantine")
            it.core.patch_node(lost, {"spec": {"unschedulable": None}})
            await it.until(lambda: not annotations(it.host(lost)), "the release")
            assert it.node(lost).state == "RELEASED"
            assert NodeUncordonRequested(node=lost) in it.posted
            host = it.host(lost)
            assert not host.spec.unschedulable
            assert quarantine.TAINT not in taints(host)

    play(scenario)


def test_lost_host_that_works_again_is_checked_and_opened(kube: Kube, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path, hosts=2) as it:
            await it.running(2)
            lost = it.driver.job().nodes[0]
            assert lost is not None
            await asyncio.to_thread(it.kubelets.fail, lost)
            await it.until(lambda: is_closed(it.host(lost)), "the quarantine")
            it.driver.answer_all("/stop/")
            await asyncio.to_thread(it.kubelets.mend, lost)
            it.driver.now_s += HURRIED.probe_s + 1.0
            await it.until(lambda: it.node(lost).state == "VALIDATING", "an agent on the host")
            assert is_closed(it.host(lost))
            it.driver.answer_all(f"{lost}/suite/")
            it.driver.answer_all(f"{lost}/suite/")
            await it.until(lambda: not annotations(it.host(lost)), "the release")
            assert not is_closed(it.host(lost))
            assert lost in it.driver.job().nodes

    play(scenario)


def test_pod_that_somebody_deleted_is_replaced_and_its_host_is_not_blamed(
    kube: Kube, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path, hosts=2) as it:
            await it.running(2)
            pod = it.pods()[0]
            host = pod.spec.node_name
            it.core.delete_namespaced_pod(pod.metadata.name, kube.namespace)
            await it.until(lambda: it.node(host).state == "RELEASED", "the loss")
            it.driver.answer_all("/stop/")
            await it.until(lambda: it.node(host).state == "ASSIGNED", "the same host again")
            assert not annotations(it.host(host))
            assert it.pods()[0].metadata.uid != pod.metadata.uid

    play(scenario)


def test_budget_that_refuses_the_eviction_delays_it_only(
    kube: Kube, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    forbid_disruption(kube)

    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(2)
            lost = it.driver.job().nodes[0]
            assert lost is not None
            uid = it.connected[lost]
            await asyncio.to_thread(it.kubelets.fail, lost)
            await it.until(
                lambda: uid not in [pod.metadata.uid for pod in it.pods()], "the pod to be gone"
            )
            assert "eviction waits" in caplog.text
            assert "its eviction was refused for too long" in caplog.text

    play(scenario)


def test_restarted_controller_does_what_the_old_one_had_only_decided(
    kube: Kube, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(2)
            lost, kept = it.driver.job().nodes
            assert lost is not None
            before = fold(it.driver.machine.state.as_changes())
            # It crashes between deciding and acting.
            await it.cluster.leave()
            await asyncio.to_thread(it.kubelets.fail, lost)
            await it.until(lambda: lost not in it.connected, "the agent to be gone")
            it.driver.send(NodeGone(node=lost, detail="power cut", at_s=it.driver.now_s))
            assert it.node(lost).state == "RETIRED"
            assert not annotations(it.host(lost))
            await it.restart()
            await it.until(lambda: is_closed(it.host(lost)), "the quarantine")
            session = it.node(lost).quarantine
            assert annotations(it.host(lost))[quarantine.SESSION] == session
            # Those that had nothing to do with it are as they were.
            assert kept is not None
            assert it.connected[kept] == before.nodes[kept].incarnation
            assert it.node(kept).state == "ASSIGNED"
            # And the other way round: released while nobody was there to do it.
            await it.cluster.leave()
            it.driver.send(NodeUncordonRequested(node=lost))
            await it.restart()
            await it.until(lambda: not annotations(it.host(lost)), "the release")

    play(scenario)


def test_controller_without_a_journal_opens_no_host(kube: Kube, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(1)
            lost = it.driver.job().nodes[0]
            assert lost is not None
            await asyncio.to_thread(it.kubelets.fail, lost)
            await it.until(lambda: is_closed(it.host(lost)), "the quarantine")
            await it.until(lambda: len(it.pods()) == 1, "the dead pod to be removed")
            await it.restart(fold([]))
            it.submit(nodes=2)
            await it.until(lambda: len(it.driver.machine.state.nodes) == 2, "other nodes")
            assert is_closed(it.host(lost))
            assert NodeId(lost) not in it.driver.machine.state.nodes

    play(scenario)


def test_forgetting_everything_deletes_every_pod(kube: Kube, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(2)
            it.driver.machine.state.jobs.clear()
            await it.cluster.forget_everything()
            await it.until(lambda: not it.pods(), "the pods to be gone")

    play(scenario)


# The link to the server


@pytest.mark.parametrize("how", ["forget_changes", "drop_connections", "freeze"])
def test_watch_survives(kube: Kube, tmp_path: Path, how: str) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path) as it:
            await it.running(1)
            if how == "freeze":
                # A dead link: nothing comes, not even an end.
                kube.server.freeze()
                lists = it.cluster.counts["List pods", "failed"]
                await it.until(
                    lambda: it.cluster.counts["List pods", "failed"] > lists,
                    "the silence to be noticed",
                )
                kube.server.thaw()
            else:
                getattr(kube.server, how)()
            it.submit(job="second", nodes=2)
            await it.until(lambda: len(it.kubelets.hosts_in_use()) == 3, "pods for a second job")
            assert it.driver.job().state == "RUNNING"

    play(scenario)


def test_server_that_is_away_stops_nothing(
    kube: Kube, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with fleet(kube, tmp_path, request_s=0.3) as it:
            await it.running(1)
            kube.server.freeze()
            it.submit(job="second", nodes=2)
            await it.until(
                lambda: it.cluster.counts["MakeBase", "failed"] > 0, "the trouble to be counted"
            )
            assert it.driver.job().state == "RUNNING"
            kube.server.thaw()
            await it.until(lambda: len(it.kubelets.hosts_in_use()) == 3, "the pods after all")
            # A creation counts when it is answered, and its pod may be seen before.
            await it.until(
                lambda: figure(it, "outlast_kube_operations_total", "CreatePod", "ok") == 3,
                "the creations to be counted",
            )
            assert figure(it, "outlast_kube_operations_total", "MakeBase", "failed") > 0
            # Pods are listed again after a pause of its own.
            await it.until(
                lambda: figure(it, "outlast_kube_pods", "Running") > 0, "the pods to be seen again"
            )

    play(scenario)
    assert "trying again" in caplog.text


# Single calls


@pytest.fixture
def api(kube: Kube, tmp_path: Path) -> KubeApi:
    async def config() -> Any:
        return Fleet(kube, tmp_path).config

    return KubeApi(asyncio.run(config()))


def manifest(name: str) -> dict[str, Any]:
    spec = {"containers": [{"name": "agent", "image": "outlast:test"}]}
    return {"metadata": {"name": name}, "spec": spec}


def test_deletion_spares_a_later_pod_of_the_same_name(kube: Kube, api: KubeApi) -> None:
    made = api.create_pod(manifest("outlast-agent-0"))
    api.delete_pod("outlast-agent-0", "another-uid", grace_s=0)
    assert kube.core().read_namespaced_pod("outlast-agent-0", kube.namespace)
    api.delete_pod("outlast-agent-0", made["metadata"]["uid"], grace_s=0)
    assert not kube.core().list_namespaced_pod(kube.namespace).items
    # What is not there is as good as deleted.
    api.delete_pod("outlast-agent-0", made["metadata"]["uid"])


def test_eviction_in_the_words_that_the_server_knows(kube: Kube, api: KubeApi) -> None:
    made = api.create_pod(manifest("outlast-agent-0"))
    api.evict_pod("outlast-agent-0", made["metadata"]["uid"])
    (pod,) = kube.core().list_namespaced_pod(kube.namespace).items or [None]
    assert pod is None or pod.metadata.deletion_timestamp
    with pytest.raises(NotFoundError):
        api.evict_pod("outlast-agent-9", "any")


def test_refused_eviction_says_when_to_come_back(kube: Kube, api: KubeApi) -> None:
    forbid_disruption(kube)
    labels = {"app.kubernetes.io/component": "agent"}
    pod = manifest("outlast-agent-0")
    pod["metadata"]["labels"] = labels
    made = api.create_pod(pod)
    kube.core().patch_namespaced_pod_status(
        "outlast-agent-0",
        kube.namespace,
        {"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}},
    )
    with pytest.raises(TooManyRequestsError) as refused:
        api.evict_pod("outlast-agent-0", made["metadata"]["uid"])
    assert refused.value.after_s > 0


def test_what_the_rights_do_not_cover_names_them(kube: Kube, api: KubeApi) -> None:
    with pytest.raises(ForbiddenError, match="deploy/kubernetes"):
        api._call("GET", "/api/v1/secrets")


def test_silent_server_costs_one_deadline_not_four(kube: Kube, tmp_path: Path) -> None:
    kube.server.freeze()

    async def scenario() -> None:
        it = Fleet(kube, tmp_path)
        api = KubeApi(it.config)
        with pytest.raises(UnreachableError, match="Read timed out"):
            await asyncio.to_thread(api.list, api.pods)

    play(scenario)
    kube.server.thaw()
