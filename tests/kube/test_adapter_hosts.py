"""What the adapter makes of hosts: closes and opens them, tries them again, hears their signs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from controller.core.node_events import NodeBack, NodeClosed, NodeGone, NodeUncordonRequested
from controller.core.records import NodeRecord
from controller.core.states import NodeState
from controller.kube.actions import Action, DeletePod, PatchHost, ProbeHost
from controller.kube.observed import Host, Pod, Taint, read_host
from controller.kube.quarantine import Quarantine, quarantine_patch
from controller.kube.reconcile import Reconciler
from outlast.ids import NodeId
from tests.kube.test_adapter_quarantine import document, merged
from tests.kube.test_adapter_reconcile import SESSION, kinds, quarantined
from tests.kube.views import CONFIG, host, node, pod, view, wanted

# Quarantine and release


def test_host_of_a_node_in_quarantine_is_closed_once() -> None:
    record = node("host-1", NodeState.RETIRED, quarantine=SESSION, since_s=100.0)
    reconciler = Reconciler(CONFIG)
    (action,) = reconciler.plan(view(nodes=(record,), hosts=(host("host-1"),))).actions[:1]
    assert isinstance(action, PatchHost)
    assert action.what == "quarantine"
    after = read_host(merged(document(host("host-1")), action.patch))
    assert "PatchHost" not in kinds(reconciler.plan(view(nodes=(record,), hosts=(after,))).actions)


def test_host_is_opened_when_its_node_is_back_in_use() -> None:
    seen = view(nodes=(node("host-1"),), hosts=(quarantined(host("host-1")),))
    (action,) = Reconciler(CONFIG).plan(seen).actions[:1]
    assert isinstance(action, PatchHost)
    assert action.what == "release"
    assert read_host(merged(document(quarantined(host("host-1"))), action.patch)) == host("host-1")


def test_uncordon_by_hand_is_told_and_not_fought() -> None:
    record = node("host-1", NodeState.RETIRED, quarantine=SESSION)
    by_hand = replace(quarantined(host("host-1")), unschedulable=False)
    plan = Reconciler(CONFIG).plan(view(nodes=(record,), hosts=(by_hand,)))
    assert plan.events == (NodeUncordonRequested(node=NodeId("host-1")),)
    assert "PatchHost" not in kinds(plan.actions)


def test_newer_fault_outweighs_an_older_release_by_hand() -> None:
    record = node("host-1", NodeState.RETIRED, quarantine="host-1/200", quarantined_s=200.0)
    by_hand = replace(quarantined(host("host-1")), unschedulable=False)
    plan = Reconciler(CONFIG).plan(view(nodes=(record,), hosts=(by_hand,)))
    assert plan.events == ()
    assert "PatchHost" in kinds(plan.actions)


def test_quarantine_that_the_journal_does_not_know_stays() -> None:
    seen = view(hosts=(quarantined(host("host-1")),))
    reconciler = Reconciler(CONFIG)
    reconciler.base_removed()
    plan = reconciler.plan(seen)
    assert (plan.events, plan.actions) == ((), ())


def test_quarantine_of_another_fleet_is_left_alone() -> None:
    wanted = Quarantine(session="s", fleet="train/other", reason="bad", since_s=0.0)
    theirs = read_host(merged(document(host("host-1")), quarantine_patch(host("host-1"), wanted)))
    record = node("host-1", NodeState.RETIRED, quarantine=SESSION)
    plan = Reconciler(CONFIG).plan(view(nodes=(record,), hosts=(theirs,)))
    assert "PatchHost" not in kinds(plan.actions)


# Hosts that work again

LOST = node("host-1", NodeState.RETIRED, quarantine=SESSION, since_s=100.0)


def test_lost_host_that_works_again_is_tried_once() -> None:
    seen = view(
        num_wanted=1,
        nodes=(LOST, node("host-2", NodeState.ASSIGNED)),
        hosts=(quarantined(host("host-1")), host("host-2")),
        pods=(pod("outlast-agent-0", on="host-2", job="gpt-1"),),
    )
    reconciler = Reconciler(CONFIG)
    assert reconciler.plan(replace(seen, wall_s=700.0)).actions == ()
    probe = ProbeHost(name="outlast-agent-1", host=NodeId("host-1"), session=SESSION)
    assert reconciler.plan(replace(seen, wall_s=701.0)).actions == (probe,)
    # An answer that was lost is no reason not to try.
    assert reconciler.plan(replace(seen, wall_s=702.0)).actions == (probe,)
    there = pod("outlast-agent-1", on="host-1", probes=SESSION)
    busy = replace(seen, wall_s=703.0, pods=(*seen.pods, there))
    (note,) = reconciler.plan(busy).actions
    assert isinstance(note, PatchHost)
    noted = read_host(merged(document(quarantined(host("host-1"))), note.patch))
    busy, seen = (
        replace(one, hosts={**one.hosts, NodeId("host-1"): noted}) for one in (busy, seen)
    )
    assert reconciler.plan(busy).actions == ()
    # It came to nothing, as a new controller knows too.
    assert Reconciler(CONFIG).plan(replace(seen, wall_s=5000.0)).actions == ()
    (action,) = reconciler.plan(replace(busy, claims=wanted(0))).actions
    assert isinstance(action, DeletePod)


def test_trial_that_waits_for_its_host_is_not_one_pod_too_many() -> None:
    seen = view(
        num_wanted=2,
        nodes=(LOST, node("host-2", NodeState.ASSIGNED)),
        hosts=(quarantined(host("host-1")), host("host-2")),
        pods=(
            pod("outlast-agent-0", probes=SESSION),
            pod("outlast-agent-1", on="host-2", job="gpt-1"),
            # It waits for a host that nobody has yet.
            pod("outlast-agent-2"),
        ),
    )
    reconciler = Reconciler(CONFIG)
    assert not deleted(reconciler.plan(seen).actions)
    assert deleted(Reconciler(CONFIG).plan(replace(seen, claims=wanted(1))).actions) == [
        "outlast-agent-2"
    ]
    assert "outlast-agent-0" in deleted(
        Reconciler(CONFIG).plan(replace(seen, claims=wanted(0))).actions
    )
    # One that the scheduler does not take there would wait for ever.
    late = replace(seen, now_s=CONFIG.patience.join_s + 1.0)
    assert deleted(reconciler.plan(late).actions) == ["outlast-agent-0"]


def deleted(actions: Iterable[Action]) -> list[str]:
    """Names of the pods that are to go."""
    return [action.name for action in actions if isinstance(action, DeletePod)]


@pytest.mark.parametrize(
    ("record", "seen"),
    [
        (LOST, replace(quarantined(host("host-1")), not_ready="Ready is Unknown")),
        (LOST, quarantined(host("host-1", unschedulable=True))),
        (LOST, host("host-1")),
        # Our own checks had failed, or nobody was heard of for hours.
        (replace(LOST, quarantines_s=(100.0,)), quarantined(host("host-1"))),
        (replace(LOST, state=NodeState.REPAIRING), quarantined(host("host-1"))),
    ],
)
def test_host_that_a_person_must_look_at_is_not_tried(record: NodeRecord, seen: Host) -> None:
    plan = Reconciler(CONFIG).plan(view(num_wanted=1, nodes=(record,), hosts=(seen,), now_s=5000.0))
    assert "ProbeHost" not in kinds(plan.actions)


# HostEvents


def looked(reconciler: Reconciler, seen: Host | None, *pods: Pod, now_s: float = 0.0) -> object:
    hosts = () if seen is None else (seen,)
    record = node("host-1", NodeState.ASSIGNED)
    seen_now = view(nodes=(record,), hosts=hosts, pods=pods, num_wanted=1, now_s=now_s)
    return reconciler.plan(seen_now).events


RUNNING = pod("outlast-agent-0", on="host-1", job="gpt-1")


def gone(detail: str, *, blames_host: bool, at_s: float = 0.0) -> NodeGone:
    return NodeGone(node=NodeId("host-1"), detail=detail, at_s=at_s, blames_host=blames_host)


def closed(reason: str) -> NodeClosed:
    return NodeClosed(node=NodeId("host-1"), reason=reason)


def test_host_that_is_not_ready_speaks_against_itself_until_it_is() -> None:
    reconciler = Reconciler(CONFIG)
    bad = host("host-1", not_ready="Ready is Unknown")
    why = "its host is not ready: Ready is Unknown"
    assert looked(reconciler, host("host-1"), RUNNING) == ()
    assert looked(reconciler, bad, RUNNING) == (gone(why, blames_host=True), closed(why))
    assert looked(reconciler, bad, RUNNING, now_s=1.0) == ()
    # An agent that was back for a moment has wiped it out.
    assert looked(reconciler, bad, RUNNING, now_s=5.0) == (gone(why, blames_host=True, at_s=5.0),)
    assert looked(reconciler, host("host-1"), RUNNING, now_s=6.0) == (
        NodeBack(node=NodeId("host-1")),
        closed(""),
    )


@pytest.mark.parametrize(
    ("seen", "its_pod", "why"),
    [
        (host("host-1"), None, "its pod was deleted"),
        (
            host("host-1"),
            replace(RUNNING, deleting=True, detail="PreemptionByScheduler"),
            "its pod outlast-agent-0 is being deleted (PreemptionByScheduler)",
        ),
        (
            host("host-1"),
            replace(RUNNING, phase="Failed", detail="Evicted: low on memory"),
            "its pod outlast-agent-0 has failed (Evicted: low on memory)",
        ),
        (
            host("host-1", taints=(Taint(key="health", effect="NoExecute", value="bad"),)),
            RUNNING,
            "its host has the taint health=bad:NoExecute",
        ),
    ],
)
def test_pod_that_somebody_took_away_does_not_speak_against_its_host(
    seen: Host, its_pod: Pod | None, why: str
) -> None:
    pods = () if its_pod is None else (its_pod,)
    assert looked(Reconciler(CONFIG), seen, *pods) == (gone(why, blames_host=False), closed(why))


def test_host_that_was_removed_is_gone_and_not_to_blame() -> None:
    reconciler = Reconciler(CONFIG)
    looked(reconciler, host("host-1"), RUNNING)
    why = "its host was removed from the cluster"
    assert looked(reconciler, None, RUNNING) == (gone(why, blames_host=False), closed(why))


def test_cordon_of_somebody_else_closes_the_node_and_takes_nothing_away() -> None:
    cordoned = host("host-1", unschedulable=True)
    assert looked(Reconciler(CONFIG), cordoned, RUNNING) == (closed("its host is cordoned"),)


def test_agents_that_people_start_elsewhere_are_not_the_clusters_to_judge() -> None:
    plan = Reconciler(CONFIG).plan(
        view(nodes=(node("laptop", NodeState.ASSIGNED),), hosts=(host("host-1"),), num_wanted=1)
    )
    assert plan.events == ()
