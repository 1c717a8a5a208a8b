"""The difference between what the machine wants of the cluster and what is there.

Pure and level-triggered: `plan` looks at one view and says what to do about it,
and forgets what it said. Whatever was done, not done, or done twice because a
controller crashed or an answer was lost shows in the next view. What is kept is
only how long things have been as they are; a new controller begins to wait anew.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from controller.core.node_events import ClusterNews, ImageNotPulled, NodeEvent, NodeReleased
from controller.core.records import NodeRecord
from controller.core.states import FREE, NodeState
from controller.kube import objects, quarantine
from controller.kube.actions import (
    Action,
    CreatePod,
    DeletePod,
    EvictPod,
    LabelPod,
    ProbeHost,
    RemoveBase,
)
from controller.kube.conditions import fault_of
from controller.kube.config import KubeConfig
from controller.kube.host_events import HostEvents
from controller.kube.observed import Host, Pod
from controller.kube.quarantines import Quarantines
from controller.kube.shares import shares
from controller.kube.timers import Timers
from controller.kube.view import View
from outlast.ids import NodeId

# A job's, or about to become one's.
_IN_USE = (*FREE, NodeState.ASSIGNED, NodeState.SUSPECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to tell the machine, and what to do meanwhile, in any order."""

    events: tuple[NodeEvent | ClusterNews, ...]
    actions: tuple[Action, ...]


class Reconciler:
    """Plans for one fleet."""

    def __init__(self, config: KubeConfig) -> None:
        self._config = config
        self._fleet = f"{config.namespace}/{config.fleet}"
        tolerations = objects.tolerations(config)
        closing = config.closing_conditions
        self._host_events = HostEvents(self._fleet, tolerations, closing, config.topology_labels)
        self._quarantines = Quarantines(
            self._fleet, tolerations, closing=closing, probe_s=config.patience.probe_s
        )
        self._timers = Timers()
        # Hosts on which a pod of an image came to nothing, and until when no other is tried there.
        self._shunned: dict[tuple[NodeId, str], float] = {}
        # Deleted once when the fleet is empty, in case an earlier controller left it.
        self._may_have_base = True

    def refused(self, uid: str, now_s: float, after_s: float) -> None:
        """The cluster does not allow a pod's eviction yet."""
        self._timers.hold(f"{uid} evicted", now_s, now_s + after_s)

    def base_removed(self) -> None:
        """The fleet's anchor and service are gone."""
        self._may_have_base = False

    def plan(self, view: View) -> Plan:
        """What to do about the present difference."""
        self._timers.begin(view.now_s)
        self._shunned = {h: until for h, until in self._shunned.items() if until > view.now_s}
        reported = self._host_events.events(view)
        lifted, patches = self._quarantines.compare(view)
        pods_out, on_the_way = self._pods(view)
        released, shaped = self._shape(view, on_the_way)
        actions = [*patches, *pods_out, *self._labels(view), *shaped]
        if not view.claims and not view.pods and self._may_have_base:
            actions.append(RemoveBase())
        pulls = self._not_pulled(on_the_way)
        self._timers.end()
        is_short = any(isinstance(action, CreatePod) for action in shaped)
        awaited = self._host_events.awaited(on_the_way, view.refusal if is_short else "")
        events = (*reported, *lifted, *released, *awaited, *pulls)
        return Plan(events=events, actions=tuple(actions))

    def _pods(self, view: View) -> tuple[list[Action], list[Pod]]:
        """What must go, and which pods are still on their way to become nodes."""
        actions: list[Action] = []
        on_the_way: list[Pod] = []
        for pod in view.pods:
            node = None if pod.host is None else view.nodes.get(pod.host)
            if pod.deleting:
                actions += self._finish(view, pod)
            elif not pod.is_alive:
                self._shun(view, pod, node)
                actions.append(_delete(pod, f"it has {pod.phase.lower()} {pod.detail}"))
            elif pod.probes and pod.host is None:
                # A trial of one host: it is none too many, however many pods wait for any host.
                if not view.claims or self._is_late(pod):
                    actions.append(_delete(pod, "its host need not or cannot be tried"))
            elif node is None or node.state is NodeState.RELEASED:
                if node is not None and self._is_given_back(view, pod, node):
                    actions.append(_delete(pod, f"its node was given back: {node.reason}"))
                elif self._is_late(pod):
                    self._shun(view, pod, node)
                    actions.append(_delete(pod, f"its agent did not join in time {pod.detail}"))
                elif reopened := self._reopened(view, pod):
                    actions.append(
                        _delete(pod, f"it keeps off {reopened}, which may be used again")
                    )
                else:
                    on_the_way.append(pod)
            elif node.state is NodeState.RETIRED and pod.probes == node.quarantine:
                if not view.claims or self._is_late(pod):
                    actions.append(_delete(pod, "its agent need not or did not join"))
            elif self._must_leave(view, node):
                actions += self._evict(pod, f"its node is {node.state}: {node.reason}")
        return actions, on_the_way

    def _is_given_back(self, view: View, pod: Pod, node: NodeRecord) -> bool:
        """Whether a pod has the agent of a node that was given back, and no new one.

        A new agent has another incarnation. Until it joins, the session of the old one may still
        look open.
        """
        is_its_own = view.incarnations.get(node.node) == node.incarnation
        return is_its_own and pod.created_s <= node.since_s

    def _is_late(self, pod: Pod) -> bool:
        """Whether a pod that has had its host for long never became a node."""
        if pod.host is None and not pod.probes:
            return False
        return self._timers.for_s(f"{pod.uid} joins") > self._config.patience.join_s

    def _reopened(self, view: View, pod: Pod) -> NodeId | None:
        """A host that a pod waits beside for ever: what it keeps off is fixed at its creation."""
        if pod.host is not None:
            return None
        hosts = (view.hosts.get(name) for name in sorted(pod.avoids))
        return next(
            (
                host.name
                for host in hosts
                if host is not None and not self._is_avoided(host, view, pod.image)
            ),
            None,
        )

    def _must_leave(self, view: View, node: NodeRecord) -> bool:
        """Whether nothing of ours may stay on a node's host.

        A node in quarantine keeps its agent: its checks decide when it may come back.
        """
        match node.state:
            case NodeState.RETIRED:
                return True
            case NodeState.DRAINED:
                return node.cordoned and not node.quarantine
            case NodeState.REPAIRING:
                return view.wall_s > node.since_s + self._config.patience.idle_s
            case _:
                return False

    def _evict(self, pod: Pod, why: str) -> list[Action]:
        key = f"{pod.uid} evicted"
        if self._timers.held_for_s(key) > self._config.patience.evict_s:
            return [_delete(pod, f"its eviction was refused for too long; {why}")]
        if self._timers.is_held(key):
            return []
        return [EvictPod(name=pod.name, uid=pod.uid, why=why)]

    def _not_pulled(self, on_the_way: list[Pod]) -> list[ClusterNews]:
        """Images of jobs that hosts have failed to fetch for long."""
        failing: dict[str, str] = {}
        for pod in on_the_way:
            lasts = pod.image and pod.pull_failure and self._timers.for_s(f"{pod.uid} pulls")
            if lasts and lasts > self._config.patience.pull_s:
                failing.setdefault(pod.image, pod.pull_failure)
        return [ImageNotPulled(image=image, detail=why) for image, why in failing.items()]

    def _finish(self, view: View, pod: Pod) -> list[Action]:
        """A host that does not answer never confirms that its pod has ended."""
        host = None if pod.host is None else view.hosts.get(pod.host)
        is_silent = pod.host is not None and (host is None or bool(host.not_ready))
        waited_s = self._timers.for_s(f"{pod.uid} ends")
        if not is_silent or waited_s < self._config.patience.terminate_s:
            return []
        why = "its host does not answer"
        return [DeletePod(name=pod.name, uid=pod.uid, grace_s=0, why=why)]

    def _shun(self, view: View, pod: Pod, node: NodeRecord | None) -> None:
        """Without this the next pod would go to the same host, and come to nothing there."""
        joined = node is not None and node.state is not NodeState.RELEASED
        if pod.host is not None and not joined:
            self._shunned[pod.host, pod.image] = view.now_s + self._config.patience.join_s

    def _shape(self, view: View, on_the_way: list[Pod]) -> tuple[list[NodeEvent], list[Action]]:
        """Have as many nodes of each image as are wanted: more pods, or fewer."""
        useful = [node for node in view.nodes.values() if self._is_useful(node)]
        wanted = shares(view.claims, useful, on_the_way, self._room(view, on_the_way))
        # Nothing runs yet in those that are on their way, least of all in unbound ones.
        waiting = sorted(on_the_way, key=lambda pod: (pod.host is not None, pod.name))
        have = Counter(node.image for node in useful) + Counter(pod.image for pod in waiting)
        surplus = have - wanted
        early = []
        for pod in waiting:
            if surplus[pod.image] > 0:
                surplus[pod.image] -= 1
                early.append(pod)
        actions: list[Action] = [_delete(pod, "no job needs it any more") for pod in early]
        actions += self._new_pods(view, wanted - have)
        vain = Counter(pod.image for pod in waiting if pod.finds_no_host and pod not in early)
        leaving = sum(_is_leaving(view, pod) for pod in view.pods if pod not in waiting)
        return self._given_back(view, surplus, vain, leaving), actions

    def _room(self, view: View, on_the_way: list[Pod]) -> int:
        """How many hosts are ours or were, and could have an agent."""
        bound = {pod.host for pod in on_the_way if pod.host is not None}
        return len(
            bound
            | {
                node.node
                for node in view.nodes.values()
                if (self._is_useful(node) or node.state is NodeState.RELEASED)
                and node.node in view.hosts
                and self._host_events.is_usable(node.node)
            }
        )

    def _new_pods(self, view: View, missing: Counter[str]) -> list[Action]:
        """As many pods as nodes are missing, and one on each lost host that is to be tried."""
        probes = self._quarantines.to_probe(view) if view.claims else []
        count = missing.total() + len(probes)
        names = iter(objects.free_names(self._config.fleet, view.pods, count))
        self._may_have_base = self._may_have_base or count > 0
        actions: list[Action] = []
        for image, number in missing.items():
            avoid = self._avoided(view, image)
            actions += [
                CreatePod(name=next(names), avoid=avoid, image=image) for _ in range(number)
            ]
        for node in probes:
            actions.append(ProbeHost(name=next(names), host=node.node, session=node.quarantine))
        return actions

    def _is_useful(self, node: NodeRecord) -> bool:
        if node.state in FREE:
            return not node.cordoned and self._host_events.is_usable(node.node)
        # One that has left its job to be checked comes back, or is quarantined.
        is_checked = node.state is NodeState.VALIDATING and not node.quarantine
        return node.state in _IN_USE or is_checked

    def _given_back(
        self, view: View, surplus: Counter[str], vain: Counter[str], leaving: int
    ) -> list[NodeEvent]:
        """Ask for free nodes that have been idle for long: the surplus, and the useless.

        At once where pods of other images, counted in `vain`, find no host, and the hosts of pods
        that are `leaving` do not suffice.
        """
        free = [
            node for node in view.nodes.values() if node.state in FREE and node.node in view.hosts
        ]
        useless = [node for node in free if not self._is_useful(node) and self._is_idle(view, node)]
        useful = [node for node in free if self._is_useful(node)]
        # Checked standbys go last.
        useful.sort(key=lambda node: (node.state is NodeState.STANDBY, node.since_s))
        left, in_need = Counter(surplus), vain.total() - leaving
        given: list[NodeRecord] = []
        for node in useful:
            makes_room = in_need > 0 and vain.total() > vain[node.image]
            if left[node.image] > 0 and (makes_room or self._is_idle(view, node)):
                left[node.image] -= 1
                in_need -= 1
                given.append(node)
        return [NodeReleased(node=node.node) for node in (*useless, *given)]

    def _is_idle(self, view: View, node: NodeRecord) -> bool:
        return view.wall_s > node.since_s + self._config.patience.idle_s

    def _avoided(self, view: View, image: str) -> tuple[NodeId, ...]:
        """Hosts on which no new pod of an image may land."""
        avoided = [host.name for host in view.hosts.values() if self._is_avoided(host, view, image)]
        return tuple(sorted(avoided))

    def _is_avoided(self, host: Host, view: View, image: str) -> bool:
        node = view.nodes.get(host.name)
        return (
            (host.name, image) in self._shunned
            or bool(quarantine.session_of(host, self._fleet))
            # No taint keeps the scheduler away from these.
            or bool(fault_of(host, self._config.closing_conditions))
            or (node is not None and (node.cordoned or bool(node.quarantine)))
        )

    def _labels(self, view: View) -> list[Action]:
        """Say on each pod whose workers it holds, for people who look at pods."""
        actions: list[Action] = []
        for pod in view.pods:
            node = None if pod.host is None else view.nodes.get(pod.host)
            job = "" if node is None or node.job is None else node.job
            if pod.is_alive and pod.job != job:
                actions.append(LabelPod(name=pod.name, uid=pod.uid, job=job))
        return actions


def _is_leaving(view: View, pod: Pod) -> bool:
    """Whether a pod that is no longer on its way is about to leave its host to another."""
    node = None if pod.host is None else view.nodes.get(pod.host)
    return pod.host is not None and (
        pod.deleting or (node is not None and node.state is NodeState.RELEASED)
    )


def _delete(pod: Pod, why: str) -> DeletePod:
    return DeletePod(name=pod.name, uid=pod.uid, grace_s=None, why=why)
