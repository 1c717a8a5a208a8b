"""Pods over time: what becomes of those that wait, and of what the server refuses."""

from __future__ import annotations

from dataclasses import replace

from controller.core.states import NodeState
from controller.kube.actions import CreatePod, DeletePod
from controller.kube.reconcile import Reconciler
from outlast.ids import NodeId
from tests.kube.test_adapter_reconcile import SESSION, kinds, quarantined
from tests.kube.views import CONFIG, host, node, pod, view


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
