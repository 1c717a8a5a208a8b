"""What the adapter does about each difference between the machine's wish and the cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.kinds import Wanted
from controller.core.node_events import NodeReleased, NodesAwaited
from controller.core.records import JobPlan, JobRecord, NodeRecord
from controller.core.states import JobState, NodeState
from controller.kube.actions import Action, CreatePod, DeletePod, EvictPod, LabelPod, RemoveBase
from controller.kube.observed import Host, read_host
from controller.kube.quarantine import Quarantine, quarantine_patch
from controller.kube.reconcile import Reconciler
from controller.kube.shares import claims
from outlast.ids import JobId, NodeId
from tests.kube.test_adapter_quarantine import document, merged
from tests.kube.views import CONFIG, FLEET, host, node, pod, view, wanted

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
    arriving = replace(seen, incarnations={NodeId("host-1"): "second"}, claims=wanted(1))
    assert Reconciler(CONFIG).plan(arriving).actions == ()
    # Nor is it in a pod that was made since, though the old one's session may look open still.
    anew = replace(seen, pods=(pod("outlast-agent-0", on="host-1", created_s=5.0),))
    assert Reconciler(CONFIG).plan(replace(anew, claims=wanted(1))).actions == ()


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


def test_no_host_is_brought_for_a_node_that_is_checked_away_from_its_job() -> None:
    """It comes back, or is quarantined; then another one is wanted."""
    nodes = (node("host-1", NodeState.ASSIGNED), node("host-2", NodeState.VALIDATING))
    pods = (pod("outlast-agent-0", on="host-1", job="gpt-1"), pod("outlast-agent-1", on="host-2"))
    hosts = (host("host-1"), host("host-2"))
    seen = view(num_wanted=2, nodes=nodes, pods=pods, hosts=hosts)
    assert Reconciler(CONFIG).plan(seen).actions == ()
    excluded = (nodes[0], node("host-2", NodeState.VALIDATING, quarantine=SESSION))
    seen = view(num_wanted=2, nodes=excluded, pods=pods, hosts=hosts)
    assert any(isinstance(each, CreatePod) for each in Reconciler(CONFIG).plan(seen).actions)


def test_jobs_are_told_once_what_their_pods_wait_for() -> None:
    why = "Unschedulable: 0/4 nodes are available"
    seen = view(num_wanted=2, pods=(pod("outlast-agent-0"), pod("outlast-agent-1", detail=why)))
    reconciler = Reconciler(CONFIG)
    told = f"2 pods are on the way; outlast-agent-1 is Pending: {why}"
    assert reconciler.plan(seen).events == (NodesAwaited(detail=told),)
    assert reconciler.plan(seen).events == ()
    assert reconciler.plan(view()).events == (NodesAwaited(detail=""),)


def test_jobs_are_told_that_their_pods_wait_to_be_admitted() -> None:
    gate = "kueue.x-k8s.io/admission"
    held = pod("outlast-agent-1", gates=(gate,), detail="SchedulingGated: Scheduling is blocked")
    seen = view(num_wanted=2, pods=(pod("outlast-agent-0"), held))
    told = f"2 pods are on the way, 1 not admitted to the cluster yet: {gate}"
    plan = Reconciler(CONFIG).plan(seen)
    assert plan.events == (NodesAwaited(detail=told),)
    # However long it waits.
    assert plan.actions == ()


def test_last_pod_takes_service_and_anchor_with_it() -> None:
    reconciler = Reconciler(CONFIG)
    dying = view(pods=(pod("outlast-agent-0", deleting=True),))
    assert reconciler.plan(dying).actions == ()
    assert reconciler.plan(view()).actions == (RemoveBase(),)
    # Asked for until it is done.
    assert reconciler.plan(view()).actions == (RemoveBase(),)
    reconciler.base_removed()
    assert reconciler.plan(view()).actions == ()


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
    assert sum(claim.nodes for claim in claims(jobs, workers=8)) == 4 + 2 + 2


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
