"""Pods over time: what becomes of those that wait, and of what the server refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from controller.core.node_events import NodesAwaited
from controller.core.states import NodeState
from controller.kube.actions import CreatePod, DeletePod
from controller.kube.observed import Pod
from controller.kube.reconcile import Reconciler
from outlast.ids import NodeId
from tests.kube.test_adapter_reconcile import SESSION, kinds, quarantined
from tests.kube.views import CONFIG, host, node, pod, view, wanted


def test_pod_that_keeps_off_a_host_is_made_anew_when_the_host_may_be_used_again() -> None:
    """A pod's affinity is fixed at its creation: it would stay Pending for ever."""
    waiting = pod("outlast-agent-0", avoids=frozenset({NodeId("host-1"), NodeId("host-9")}))
    seen = view(
        num_wanted=1,
        nodes=(node("host-1", NodeState.RETIRED, quarantine=SESSION),),
        pods=(waiting,),
        hosts=(quarantined(host("host-1")),),
    )
    reconciler = Reconciler(CONFIG)
    # What is not in the cluster any more does not count.
    assert reconciler.plan(seen).actions == ()
    mended = replace(
        seen,
        nodes={NodeId("host-1"): node("host-1", NodeState.RELEASED)},
        hosts={NodeId("host-1"): host("host-1")},
    )
    deleted, created = reconciler.plan(mended).actions
    assert isinstance(deleted, DeletePod)
    assert deleted.why == "it keeps off host-1, which may be used again"
    assert created == CreatePod(name="outlast-agent-1", avoid=())
    # One that has found a place is not disturbed.
    bound = replace(mended, pods=(replace(waiting, host=NodeId("host-2")),))
    assert reconciler.plan(bound).actions == ()


def test_registry_that_was_away_for_long_leaves_no_pod_that_fits_nowhere() -> None:
    reconciler = Reconciler(CONFIG)
    stuck = pod("outlast-agent-0", on="host-1", phase="Pending", detail="ErrImagePull")
    seen = view(num_wanted=1, pods=(stuck,), hosts=(host("host-1"),))
    reconciler.plan(seen)
    (_, created) = reconciler.plan(replace(seen, now_s=901.0)).actions
    assert created == CreatePod(name="outlast-agent-1", avoid=(NodeId("host-1"),))
    waiting = pod("outlast-agent-1", avoids=frozenset({NodeId("host-1")}))
    later = replace(seen, now_s=902.0, pods=(waiting,))
    assert reconciler.plan(later).actions == ()
    kinds_then = kinds(reconciler.plan(replace(later, now_s=1802.0)).actions)
    assert kinds_then == ["DeletePod", "CreatePod"]


def test_budget_is_not_passed_over_before_it_has_refused() -> None:
    """Evictions may be late for other reasons, such as a server that was away."""
    seen = view(
        nodes=(node("host-1", NodeState.RETIRED, quarantine=SESSION),),
        pods=(pod("outlast-agent-0", on="host-1"),),
        hosts=(quarantined(host("host-1")),),
    )
    reconciler = Reconciler(CONFIG)
    reconciler.plan(seen)
    assert kinds(reconciler.plan(replace(seen, now_s=3600.0)).actions) == ["EvictPod"]
    reconciler.refused("uid-outlast-agent-0", 3600.0, 5.0)
    assert kinds(reconciler.plan(replace(seen, now_s=3629.0)).actions) == ["EvictPod"]
    assert kinds(reconciler.plan(replace(seen, now_s=3631.0)).actions) == ["DeletePod"]


def test_job_is_told_why_no_pod_can_be_made_for_as_long_as_one_is_wanted() -> None:
    reconciler = Reconciler(CONFIG)
    seen = view(num_wanted=1)
    assert reconciler.plan(seen).events == ()
    refused = replace(seen, refusal="exceeded quota: gpus")
    told = NodesAwaited(detail="a pod cannot be made: exceeded quota: gpus")
    assert reconciler.plan(refused).events == (told,)
    assert reconciler.plan(replace(refused, claims=wanted(0))).events == (NodesAwaited(detail=""),)


class Counted(tuple[Pod, ...]):
    """Pods that count how often somebody goes through all of them."""

    num_passes = 0

    def __iter__(self) -> Iterator[Pod]:
        self.num_passes += 1
        return super().__iter__()


def test_a_look_goes_through_the_pods_a_few_times_however_many_nodes_there_are() -> None:
    """A look that lasts holds up the controller's only loop."""
    names = [f"host-{number}" for number in range(100)]
    pods = Counted(pod(f"outlast-agent-{n}", on=name, job="gpt-1") for n, name in enumerate(names))
    Reconciler(CONFIG).plan(
        view(
            num_wanted=100,
            nodes=tuple(node(name, NodeState.ASSIGNED) for name in names),
            pods=pods,
            hosts=tuple(host(name) for name in names),
            connected=tuple(names),
        )
    )
    assert pods.num_passes < 20
