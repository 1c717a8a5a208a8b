"""Hosts that others speak for: people, clouds that replace them, and monitors of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.node_events import NodeClosed, NodeLocated, NodeReplaced
from controller.core.states import NodeState
from controller.kube.actions import CreatePod, PatchHost, ProbeHost
from controller.kube.conditions import ClosingCondition, fault_of, parse
from controller.kube.observed import Condition, Host, read_host
from controller.kube.reconcile import Reconciler
from outlast.ids import NodeId
from tests.kube.test_adapter_quarantine import document, merged
from tests.kube.test_adapter_reconcile import SESSION, kinds, quarantined
from tests.kube.views import CONFIG, host, node, pod, view

BROKEN = {"GPUMissing": Condition(status="True", message="GPUMissing: 7 of 8")}
HOST = NodeId("host-1")


# A person


def test_uncordon_by_hand_wins_even_when_the_journal_was_lost() -> None:
    by_hand = replace(quarantined(host("host-1")), unschedulable=False)
    (action, created) = Reconciler(CONFIG).plan(view(hosts=(by_hand,), num_wanted=1)).actions
    assert isinstance(action, PatchHost)
    assert action.what == "release"
    after = read_host(merged(document(by_hand), action.patch))
    assert after == host("host-1")
    assert isinstance(created, CreatePod)
    plan = Reconciler(CONFIG).plan(view(hosts=(after,), num_wanted=1))
    assert plan.actions == (CreatePod(name="outlast-agent-0", avoid=()),)


# A cloud


@pytest.mark.parametrize("state", [NodeState.REPAIRING, NodeState.RETIRED])
def test_new_machine_under_an_old_name_does_not_pay_for_its_predecessor(state: NodeState) -> None:
    record = node(
        "host-1",
        state,
        quarantine=SESSION,
        quarantined_s=100.0,
        quarantines_s=(100.0,),
        since_s=500.0,
    )
    fresh = host("host-1", created_s=101.0)
    plan = Reconciler(CONFIG).plan(view(nodes=(record,), hosts=(fresh,)))
    assert NodeReplaced(node=HOST) in plan.events
    assert "PatchHost" not in kinds(plan.actions)
    old = Reconciler(CONFIG).plan(view(nodes=(record,), hosts=(host("host-1", created_s=99.0),)))
    assert NodeReplaced(node=HOST) not in old.events
    assert "PatchHost" in kinds(old.actions)


def test_age_of_a_host_is_read() -> None:
    stamp = {"name": "host-1", "resourceVersion": "3", "creationTimestamp": "1970-01-01T00:01:41Z"}
    assert read_host({"metadata": stamp}).created_s == 101.0


# Places


LABELS = {"zone": "z1", "rack": "r7"}


def test_labels_of_a_host_say_where_it_stands_before_its_agent_is_there_and_once() -> None:
    seen = view(hosts=(host("host-1", labels=LABELS), host("host-2")))
    reconciler = Reconciler(replace(CONFIG, topology_labels=("zone", "rack")))
    located = NodeLocated(node=HOST, topology="z1/r7")
    assert reconciler.plan(seen).events == (located,)
    assert reconciler.plan(seen).events == ()
    moved = replace(seen, hosts={HOST: host("host-1", labels={**LABELS, "rack": "r8"})})
    assert reconciler.plan(moved).events == (NodeLocated(node=HOST, topology="z1/r8"),)
    gone = replace(seen, hosts={HOST: host("host-1")})
    assert reconciler.plan(gone).events == (NodeLocated(node=HOST, topology=""),)


def test_labels_of_a_host_are_read() -> None:
    metadata = {"name": "host-1", "resourceVersion": "3", "labels": LABELS}
    assert read_host({"metadata": metadata}).labels == LABELS
    del metadata["labels"]
    assert read_host({"metadata": metadata}).labels == {}


# Monitors


def test_condition_of_a_monitor_closes_the_host_and_takes_nothing_away() -> None:
    seen = view(
        num_wanted=2,
        nodes=(node("host-1", NodeState.ASSIGNED),),
        pods=(pod("outlast-agent-0", on="host-1", job="gpt-1"),),
        hosts=(host("host-1", conditions=BROKEN), host("host-2")),
        connected=("host-1",),
    )
    plan = Reconciler(CONFIG).plan(seen)
    why = "its host has the condition GPUMissing=True (GPUMissing: 7 of 8)"
    assert plan.events == (NodeClosed(node=HOST, reason=why, is_broken=True),)
    # No taint keeps the scheduler away.
    assert plan.actions == (CreatePod(name="outlast-agent-1", avoid=(HOST,)),)


def test_lost_host_that_a_monitor_calls_broken_is_not_tried() -> None:
    lost = node("host-1", NodeState.RETIRED, quarantine=SESSION, since_s=100.0)
    closed = quarantined(host("host-1"))
    seen = view(num_wanted=1, nodes=(lost,), hosts=(closed,), now_s=5000.0)
    assert "ProbeHost" in kinds(Reconciler(CONFIG).plan(seen).actions)
    broken = replace(closed, conditions=BROKEN)
    plan = Reconciler(CONFIG).plan(replace(seen, hosts={HOST: broken}))
    assert not any(isinstance(action, ProbeHost) for action in plan.actions)


@pytest.mark.parametrize(
    ("kind", "status", "closes"),
    [
        ("KernelDeadlock", "True", True),
        ("KernelDeadlock", "False", False),
        ("KernelDeadlock", "Unknown", False),
        # A monitor whose good word is True.
        ("AcceleratedHardwareReady", "False", True),
        ("AcceleratedHardwareReady", "True", False),
        # The kubelet's own taint keeps pods away as long as it lasts.
        ("DiskPressure", "True", False),
        ("SomethingElse", "True", False),
    ],
)
def test_common_conditions_close(kind: str, status: str, closes: bool) -> None:
    said = {"type": kind, "status": status, "reason": "Because"}
    metadata = {"name": "host-1", "resourceVersion": "3"}
    seen: Host = read_host({"metadata": metadata, "status": {"conditions": [said]}})
    assert bool(fault_of(seen, CONFIG.closing_conditions)) is closes


def test_condition_as_a_person_writes_it() -> None:
    assert parse("Broken") == ClosingCondition(kind="Broken", status="True")
    assert parse("Ready2=False") == ClosingCondition(kind="Ready2", status="False")
    for wrong in ("", "=False", "Broken=no", "Broken="):
        with pytest.raises(ValueError, match="condition is"):
            parse(wrong)
