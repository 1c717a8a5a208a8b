"""What the adapter does about each difference between the machine's wish and the cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.events import (
    NodeBack,
    NodeClosed,
    NodeGone,
    NodeReleased,
    NodesAwaited,
    NodeUncordonRequested,
)
from controller.core.records import JobPlan, JobRecord, NodeRecord, Wanted
from controller.core.states import JobState, NodeState
from controller.kube.actions import (
    Action,
    CreatePod,
    DeletePod,
    EvictPod,
    LabelPod,
    PatchHost,
    ProbeHost,
    RemoveBase,
)
from controller.kube.observed import Host, Pod, Taint, read_host
from controller.kube.quarantine import Quarantine, quarantine_patch
from controller.kube.reconcile import Reconciler
from controller.kube.view import num_wanted
from outlast.ids import JobId, NodeId
from tests.kube.test_adapter_quarantine import document, merged
from tests.kube.views import CONFIG, FLEET, host, node, pod, view

SESSION = "host-1/100"


def quarantined(seen: Host, session: str = SESSION) -> Host:
    wanted = Quarantine(session=session, fleet=FLEET, reason="bad", since_s=100.0)
    return read_host(merged(document(seen), quarantine_patch(seen, wanted)))


def kinds(actions: tuple[Action, ...]) -> list[str]:
    return [type(action).__name__ for action in actions]


# Pods


def test_missing_nodes_become_pods_with_deterministic_names() -> None:
    plan = Reconciler(CONFIG).plan(view(num_wanted=2))
    assert plan.actions == (
        CreatePod(name="outlast-agent-0", avoid=()),
        CreatePod(name="outlast-agent-1", avoid=()),
    )


def test_pods_on_their_way_and_nodes_in_use_are_counted() -> None:
    plan = Reconciler(CONFIG).plan(
        view(
            num_wanted=4,
            nodes=(node("host-1", NodeState.ASSIGNED), node("host-2")),
            pods=(
                pod("outlast-agent-0", on="host-1", job="gpt-1"),
                pod("outlast-agent-1", on="host-2"),
                # Bound, its agent has not joined yet.
                pod("outlast-agent-2", on="host-3"),
            ),
            hosts=(host("host-1"), host("host-2"), host("host-3")),
            connected=("host-1", "host-2"),
        )
    )
    assert plan.actions == (CreatePod(name="outlast-agent-3", avoid=()),)
    assert plan.events == (NodesAwaited(detail="1 pod is on the way"),)


def test_new_pods_keep_off_hosts_that_are_out() -> None:
    plan = Reconciler(CONFIG).plan(
        view(
            num_wanted=1,
            nodes=(
                node("host-1", NodeState.RETIRED, quarantine=SESSION),
                node("host-2", NodeState.DRAINED, cordoned=True),
                node("host-3", NodeState.RELEASED),
            ),
            hosts=(
                quarantined(host("host-1")),
                host("host-2"),
                host("host-3"),
                # Of an earlier journal.
                quarantined(host("host-4"), "host-4/1"),
            ),
        )
    )
    assert plan.actions == (
        CreatePod(
            name="outlast-agent-0", avoid=(NodeId("host-1"), NodeId("host-2"), NodeId("host-4"))
        ),
    )


def test_pods_that_nobody_needs_any_more_go_before_they_run() -> None:
    plan = Reconciler(CONFIG).plan(
        view(
            num_wanted=1,
            pods=(pod("outlast-agent-0", on="host-1"), pod("outlast-agent-1")),
            hosts=(host("host-1"),),
        )
    )
    (action,) = plan.actions
    assert isinstance(action, DeletePod)
    assert (action.name, action.uid) == ("outlast-agent-1", "uid-outlast-agent-1")


def test_idle_nodes_are_asked_for_after_a_while_and_standbys_last() -> None:
    nodes = (
        node("host-1", NodeState.STANDBY),
        node("host-2", since_s=10.0),
        node("host-3", since_s=20.0),
    )
    seen = view(
        num_wanted=1,
        nodes=nodes,
        pods=tuple(pod(f"outlast-agent-{n}", on=f"host-{n}") for n in (1, 2, 3)),
        hosts=tuple(host(f"host-{n}") for n in (1, 2, 3)),
        connected=("host-1", "host-2", "host-3"),
    )
    reconciler = Reconciler(CONFIG)
    assert reconciler.plan(replace(seen, wall_s=300.0)).events == ()
    assert reconciler.plan(replace(seen, wall_s=321.0)).events == (
        NodeReleased(node=NodeId("host-2")),
        NodeReleased(node=NodeId("host-3")),
    )


def test_node_that_was_given_back_loses_its_pod() -> None:
    seen = view(
        nodes=(node("host-1", NodeState.RELEASED),),
        pods=(pod("outlast-agent-0", on="host-1"),),
        hosts=(host("host-1"),),
        connected=("host-1",),
    )
    (action,) = Reconciler(CONFIG).plan(seen).actions
    assert isinstance(action, DeletePod)
    # A new agent has another incarnation than the machine remembers.
    arriving = replace(seen, incarnations={NodeId("host-1"): "second"}, num_wanted=1)
    assert Reconciler(CONFIG).plan(arriving).actions == ()


@pytest.mark.parametrize(
    ("record", "leaves"),
    [
        (node("host-1", NodeState.RETIRED, quarantine=SESSION), True),
        (node("host-1", NodeState.DRAINED, cordoned=True), True),
        (node("host-1", NodeState.REPAIRING, quarantine=SESSION), True),
        # Its checks decide when it may come back, and they need its agent.
        (node("host-1", NodeState.QUARANTINED, quarantine=SESSION), False),
        (node("host-1", NodeState.VALIDATING, quarantine=SESSION), False),
        (node("host-1", NodeState.DRAINING), False),
    ],
)
def test_agent_leaves_hosts_that_were_given_up(record: NodeRecord, leaves: bool) -> None:
    seen = host("host-1")
    plan = Reconciler(CONFIG).plan(
        view(
            nodes=(record,),
            pods=(pod("outlast-agent-0", on="host-1"),),
            hosts=(quarantined(seen) if record.quarantine else seen,),
            connected=("host-1",),
            now_s=301.0,
        )
    )
    assert ("EvictPod" in kinds(plan.actions)) is leaves


def test_refused_eviction_waits_and_then_becomes_a_deletion() -> None:
    seen = view(
        nodes=(node("host-1", NodeState.RETIRED, quarantine=SESSION),),
        pods=(pod("outlast-agent-0", on="host-1"),),
        hosts=(quarantined(host("host-1")),),
    )
    reconciler = Reconciler(CONFIG)
    assert kinds(reconciler.plan(seen).actions) == ["EvictPod"]
    reconciler.refused("uid-outlast-agent-0", 0.0, 5.0)
    assert reconciler.plan(replace(seen, now_s=4.0)).actions == ()
    assert kinds(reconciler.plan(replace(seen, now_s=6.0)).actions) == ["EvictPod"]
    (action,) = reconciler.plan(replace(seen, now_s=31.0)).actions
    assert isinstance(action, DeletePod)
    assert (action.uid, action.grace_s) == ("uid-outlast-agent-0", None)


def test_pod_that_its_host_never_confirms_is_removed_by_force() -> None:
    dying = pod("outlast-agent-0", on="host-1", deleting=True)
    silent = view(pods=(dying,), hosts=(host("host-1", not_ready="Ready is Unknown"),))
    reconciler = Reconciler(CONFIG)
    assert reconciler.plan(silent).actions == ()
    (action,) = reconciler.plan(replace(silent, now_s=30.0)).actions
    assert action == DeletePod(
        name="outlast-agent-0",
        uid="uid-outlast-agent-0",
        grace_s=0,
        why="its host does not answer",
    )


def test_pod_whose_host_answers_is_never_removed_by_force() -> None:
    dying = pod("outlast-agent-0", on="host-1", deleting=True)
    seen = view(pods=(dying,), hosts=(host("host-1"),))
    reconciler = Reconciler(CONFIG)
    reconciler.plan(seen)
    assert reconciler.plan(replace(seen, now_s=3600.0)).actions == ()


def test_host_on_which_a_pod_came_to_nothing_is_not_tried_again_soon() -> None:
    failed = pod("outlast-agent-0", on="host-1", phase="Failed", detail="UnexpectedAdmissionError")
    reconciler = Reconciler(CONFIG)
    plan = reconciler.plan(view(num_wanted=1, pods=(failed,), hosts=(host("host-1"),)))
    assert plan.actions[1:] == (CreatePod(name="outlast-agent-1", avoid=(NodeId("host-1"),)),)
    assert isinstance(plan.actions[0], DeletePod)
    later = reconciler.plan(view(num_wanted=1, hosts=(host("host-1"),), now_s=901.0))
    assert later.actions == (CreatePod(name="outlast-agent-0", avoid=()),)


def test_pod_whose_agent_never_joins_is_replaced_elsewhere() -> None:
    seen = view(num_wanted=1, pods=(pod("outlast-agent-0", on="host-1"),), hosts=(host("host-1"),))
    reconciler = Reconciler(CONFIG)
    assert reconciler.plan(seen).actions == ()
    plan = reconciler.plan(replace(seen, now_s=901.0))
    assert kinds(plan.actions) == ["DeletePod", "CreatePod"]
    assert plan.actions[1] == CreatePod(name="outlast-agent-1", avoid=(NodeId("host-1"),))


def test_pods_say_whose_workers_they_hold() -> None:
    plan = Reconciler(CONFIG).plan(
        view(
            num_wanted=2,
            nodes=(node("host-1", NodeState.ASSIGNED), node("host-2")),
            pods=(
                pod("outlast-agent-0", on="host-1"),
                pod("outlast-agent-1", on="host-2", job="gpt-0"),
            ),
            hosts=(host("host-1"), host("host-2")),
        )
    )
    assert plan.actions == (
        LabelPod(name="outlast-agent-0", uid="uid-outlast-agent-0", job="gpt-1"),
        LabelPod(name="outlast-agent-1", uid="uid-outlast-agent-1", job=""),
    )


def test_last_pod_takes_service_and_anchor_with_it() -> None:
    reconciler = Reconciler(CONFIG)
    dying = view(pods=(pod("outlast-agent-0", deleting=True),))
    assert reconciler.plan(dying).actions == ()
    assert reconciler.plan(view()).actions == (RemoveBase(),)
    # Asked for until it is done.
    assert reconciler.plan(view()).actions == (RemoveBase(),)
    reconciler.base_removed()
    assert reconciler.plan(view()).actions == ()


# Hosts


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
    record = node("host-1", NodeState.RETIRED, quarantine="host-1/200")
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
    (action,) = reconciler.plan(replace(busy, num_wanted=0)).actions
    assert isinstance(action, DeletePod)


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


# Signs


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


def test_jobs_are_told_once_what_their_pods_wait_for() -> None:
    why = "Unschedulable: 0/4 nodes are available"
    seen = view(num_wanted=2, pods=(pod("outlast-agent-0"), pod("outlast-agent-1", detail=why)))
    reconciler = Reconciler(CONFIG)
    told = f"2 pods are on the way; outlast-agent-1 is Pending: {why}"
    assert reconciler.plan(seen).events == (NodesAwaited(detail=told),)
    assert reconciler.plan(seen).events == ()
    assert reconciler.plan(view()).events == (NodesAwaited(detail=""),)


# How many


def job(state: JobState, *, wanted: Wanted = Wanted.RUN, **changes: int) -> JobRecord:
    values = {"nodes": 4, "workers_per_node": 8, "standby": 0, **changes}
    plan = JobPlan(
        total_steps=1,
        retry_budget=1,
        in_place_restarts=1,
        first_step_timeout_s=1.0,
        stop_timeout_s=1.0,
        preflight_timeout_s=1.0,
        diagnose_timeout_s=1.0,
        **values,
    )
    return JobRecord(
        job_id=JobId("gpt-1"),
        name="gpt",
        request_id="",
        spec_json="{}",
        checkpoint_url="",
        plan=plan,
        submitted_s=0.0,
        state=state,
        since_s=0.0,
        reason="",
        wanted=wanted,
    )


def test_live_jobs_want_their_nodes_and_the_largest_number_of_spares() -> None:
    jobs = [
        job(JobState.QUEUED, standby=1),
        job(JobState.RUNNING, nodes=2, standby=2),
        job(JobState.PAUSED),
        job(JobState.CANCELLED),
        job(JobState.SUSPENDING, wanted=Wanted.CANCEL),
        job(JobState.QUEUED, workers_per_node=16),
    ]
    assert num_wanted(jobs, workers=8) == 4 + 2 + 2


# Everything at once

STATES = st.sampled_from(list(NodeState))
HOSTS = st.sampled_from(["host-0", "host-1", "host-2", "host-3"])


@st.composite
def fleets(draw: st.DrawFn) -> tuple[int, dict[str, NodeState], dict[str, str]]:
    """How many nodes are wanted, what the machine knows, and where pods are."""
    known = draw(st.dictionaries(HOSTS, STATES, max_size=4))
    places = draw(st.lists(HOSTS, max_size=4, unique=True))
    return draw(st.integers(0, 4)), known, {f"outlast-agent-{i}": h for i, h in enumerate(places)}


@settings(max_examples=300)
@given(fleets())
def test_plan_never_asks_twice_for_one_thing_nor_hits_a_node_in_use(
    fleet: tuple[int, dict[str, NodeState], dict[str, str]],
) -> None:
    wanted, known, places = fleet
    in_use = [name for name, state in known.items() if state is NodeState.ASSIGNED]
    seen = view(
        num_wanted=wanted,
        nodes=tuple(
            node(name, state, quarantine=SESSION if state is NodeState.RETIRED else "")
            for name, state in known.items()
        ),
        pods=tuple(pod(name, on=place) for name, place in places.items()),
        hosts=tuple(host(f"host-{n}") for n in range(4)),
        connected=tuple(known),
        now_s=1000.0,
    )
    plan = Reconciler(CONFIG).plan(seen)
    touched = [
        action.name
        for action in plan.actions
        if isinstance(action, DeletePod | EvictPod | CreatePod)
    ]
    assert len(touched) == len(set(touched))
    for action in plan.actions:
        if isinstance(action, DeletePod | EvictPod):
            assert places[action.name] not in in_use
        if isinstance(action, CreatePod):
            assert action.name not in places
    assert all(event.node not in in_use for event in plan.events if isinstance(event, NodeReleased))
    created = sum(isinstance(action, CreatePod) for action in plan.actions)
    assert created <= wanted
