"""Jobs with images of their own: pods for each image, and hosts that change from one to another."""

from __future__ import annotations

from dataclasses import replace

from controller.core.capacity import Capacity
from controller.core.node_events import ImageNotPulled, NodeReleased
from controller.core.records import NodeRecord
from controller.core.states import NodeState
from controller.kube import objects
from controller.kube.actions import CreatePod, DeletePod
from controller.kube.observed import Pod, read_pod
from controller.kube.reconcile import Plan, Reconciler
from controller.kube.shares import Claim
from controller.kube.view import View
from outlast.ids import NodeId
from tests.kube.views import CONFIG, host, node, pod, view

OWN = ""
NEMO = "registry.example/nemo:24"
HOSTS = tuple(host(f"host-{number}") for number in range(4))


def runs(name: str, image: str, state: NodeState = NodeState.READY) -> NodeRecord:
    return node(name, state, capacity=Capacity(image=image))


def created(plan: Plan) -> list[str]:
    return [action.image for action in plan.actions if isinstance(action, CreatePod)]


def deleted(plan: Plan) -> list[str]:
    return [action.name for action in plan.actions if isinstance(action, DeletePod)]


def released(plan: Plan) -> list[str]:
    return [event.node for event in plan.events if isinstance(event, NodeReleased)]


def waiting(name: str, image: str = OWN) -> Pod:
    return pod(name, image=image, finds_no_host=True, detail="Unschedulable: no host")


def fleet(claims: tuple[Claim, ...], images: dict[str, str], *pods: Pod) -> View:
    """A view in which host-N of `images` has a connected node that runs its image, and is free."""
    return view(
        claims=claims,
        nodes=tuple(runs(name, image) for name, image in images.items()),
        pods=(
            *(
                pod(f"outlast-agent-{10 + index}", on=name, image=image)
                for index, (name, image) in enumerate(images.items())
            ),
            *pods,
        ),
        hosts=HOSTS,
        connected=tuple(images),
    )


def test_each_image_gets_pods_of_its_own() -> None:
    claims = (Claim(nodes=2, image=NEMO), Claim(nodes=1))
    assert created(Reconciler(CONFIG).plan(fleet(claims, {}))) == [NEMO, NEMO, OWN]


def test_a_node_with_another_image_is_none_of_those_that_are_wanted() -> None:
    seen = fleet((Claim(nodes=2, image=NEMO),), {"host-0": OWN, "host-1": NEMO})
    plan = Reconciler(CONFIG).plan(seen)
    assert created(plan) == [NEMO]
    # It may be wanted again soon: hosts are there for both.
    assert released(plan) == []
    late = Reconciler(CONFIG).plan(replace(seen, wall_s=301.0))
    assert released(late) == ["host-0"]


def test_a_pod_on_its_way_that_nobody_wants_in_its_image_goes() -> None:
    seen = fleet((Claim(nodes=1, image=NEMO),), {}, pod("outlast-agent-0"))
    plan = Reconciler(CONFIG).plan(seen)
    assert (created(plan), deleted(plan)) == ([NEMO], ["outlast-agent-0"])


def test_an_idle_node_makes_room_at_once_for_a_pod_that_finds_no_host() -> None:
    images = {"host-0": OWN, "host-1": OWN, "host-2": NEMO, "host-3": OWN}
    claims = (Claim(nodes=1), Claim(nodes=2, image=NEMO))
    plan = Reconciler(CONFIG).plan(fleet(claims, images, waiting("outlast-agent-0", NEMO)))
    assert (created(plan), deleted(plan)) == ([], [])
    assert released(plan) == ["host-0"]
    # One of the same image cannot help.
    claims = (Claim(nodes=3, image=NEMO),)
    plan = Reconciler(CONFIG).plan(
        fleet(claims, {"host-0": NEMO, "host-1": NEMO}, waiting("outlast-agent-0", NEMO))
    )
    assert released(plan) == []


def test_of_two_jobs_that_hold_half_their_hosts_the_later_gives_way() -> None:
    images = {"host-0": OWN, "host-1": NEMO, "host-2": OWN, "host-3": NEMO}
    claims = (Claim(nodes=4, image=NEMO), Claim(nodes=4))
    pods = [
        *(waiting(f"outlast-agent-{number}", NEMO) for number in (0, 1)),
        *(waiting(f"outlast-agent-{number}") for number in (2, 3)),
    ]
    reconciler = Reconciler(CONFIG)
    plan = reconciler.plan(fleet(claims, images, *pods))
    assert deleted(plan) == ["outlast-agent-2", "outlast-agent-3"]
    assert released(plan) == ["host-0", "host-2"]
    assert created(plan) == []

    # While the hosts change hands nobody else asks for them.
    given = fleet(claims, {"host-1": NEMO, "host-3": NEMO}, *pods[:2])
    gone = {name: runs(name, OWN, NodeState.RELEASED) for name in ("host-0", "host-2")}
    changing = replace(given, nodes={**given.nodes, **{NodeId(n): r for n, r in gone.items()}})
    plan = reconciler.plan(changing)
    assert (created(plan), deleted(plan), released(plan)) == ([], [], [])

    # Served, it lets the other one ask again.
    plan = reconciler.plan(fleet(claims, {f"host-{number}": NEMO for number in range(4)}))
    assert created(plan) == [OWN] * 4
    asked = [waiting(f"outlast-agent-{number}") for number in range(4)]
    plan = reconciler.plan(fleet(claims, {f"host-{number}": NEMO for number in range(4)}, *asked))
    assert (created(plan), deleted(plan), released(plan)) == ([], [], [])


def test_a_host_where_one_image_came_to_nothing_is_tried_with_others() -> None:
    failed = pod("outlast-agent-0", on="host-0", phase="Failed", image=NEMO)
    seen = view(claims=(Claim(nodes=1, image=NEMO), Claim(nodes=1)), pods=(failed,), hosts=HOSTS)
    plan = Reconciler(CONFIG).plan(seen)
    avoided = {
        action.image: action.avoid for action in plan.actions if isinstance(action, CreatePod)
    }
    assert avoided == {NEMO: ("host-0",), OWN: ()}


def test_an_agent_in_a_jobs_image_brings_its_own_python() -> None:
    rights = {"allowPrivilegeEscalation": False}
    template = {"spec": {"containers": [{"name": "agent", "securityContext": rights}]}}
    config = replace(CONFIG, pod_template=template)
    made = objects.agent_pod(config, "outlast-agent-0", "uid", (), NEMO)
    (agent,) = made["spec"]["containers"]
    assert agent["image"] == NEMO
    assert agent["command"] == ["/opt/outlast/bin/python3", "-E", "-P", "-m", "controller.agent"]
    assert agent["args"][-2:] == ["--image", NEMO]
    (mount,) = (each for each in agent["volumeMounts"] if each["mountPath"] == "/opt/outlast")
    assert mount["readOnly"]

    (init,) = made["spec"]["initContainers"]
    assert (init["image"], init["securityContext"]) == (CONFIG.image, rights)
    assert init["volumeMounts"][0]["name"] == mount["name"]
    assert mount["name"] in [each["name"] for each in made["spec"]["volumes"]]

    seen = read_pod({**made, "metadata": {**made["metadata"], "uid": "1"}})
    assert seen.image == NEMO
    plain = objects.agent_pod(config, "outlast-agent-0", "uid")
    assert read_pod({**plain, "metadata": {**plain["metadata"], "uid": "1"}}).image == OWN


def test_an_image_that_cannot_be_pulled_is_named() -> None:
    made = objects.agent_pod(CONFIG, "outlast-agent-0", "uid", (), NEMO)
    waits = {
        "name": "agent",
        "state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}},
    }
    status = {
        "phase": "Pending",
        "initContainerStatuses": [{"state": {"terminated": {"reason": "Completed"}}}],
        "containerStatuses": [waits],
    }
    seen = read_pod({**made, "metadata": {**made["metadata"], "uid": "1"}, "status": status})
    assert "ErrImagePull: no such tag" in seen.detail
    assert "Completed" not in seen.detail
    assert seen.pull_failure == "ErrImagePull: no such tag"


def test_the_scheduler_says_that_it_finds_no_host() -> None:
    made = objects.agent_pod(CONFIG, "outlast-agent-0", "uid")
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    document = {**made, "metadata": {**made["metadata"], "uid": "1"}}
    assert read_pod({**document, "status": {"conditions": [condition]}}).finds_no_host
    assert not read_pod(document).finds_no_host


def test_an_image_that_is_not_pulled_for_long_is_told_of() -> None:
    why = "ErrImagePull: no such tag"
    claims = (Claim(nodes=1, image=NEMO),)
    failing = pod("outlast-agent-0", on="host-0", phase="Pending", image=NEMO, pull_failure=why)
    reconciler = Reconciler(CONFIG)
    told = ImageNotPulled(image=NEMO, detail=why)
    assert told not in reconciler.plan(fleet(claims, {}, failing)).events
    later = replace(fleet(claims, {}, failing), now_s=121.0)
    assert told in reconciler.plan(later).events
    # Of the agents' own image a job knows nothing.
    ours = pod("outlast-agent-0", on="host-0", phase="Pending", pull_failure=why)
    reconciler = Reconciler(CONFIG)
    for now_s in (0.0, 121.0):
        plan = reconciler.plan(replace(fleet((Claim(nodes=1),), {}, ours), now_s=now_s))
        assert not [event for event in plan.events if isinstance(event, ImageNotPulled)]


def test_no_more_hosts_are_given_back_than_are_needed() -> None:
    images = {"host-1": OWN, "host-2": OWN, "host-3": OWN}
    seen = fleet((Claim(nodes=1, image=NEMO),), images, waiting("outlast-agent-0", NEMO))
    assert released(Reconciler(CONFIG).plan(seen)) == ["host-1"]
    # The one that is on its way out makes room, whether its pod has been told so or not.
    gone = replace(seen.nodes[NodeId("host-1")], state=NodeState.RELEASED)
    leaving = replace(seen, nodes={**seen.nodes, NodeId("host-1"): gone})
    assert released(Reconciler(CONFIG).plan(leaving)) == []
    ending = tuple(replace(each, deleting=each.host == "host-1") for each in seen.pods)
    assert released(Reconciler(CONFIG).plan(replace(leaving, pods=ending))) == []
