"""What the cluster says of nodes, as events: the second sign that a loss needs.

A node is *gone* when its host does not work or its pod does not run; the machine
acts on that only when the agent is silent too. A host that is bad speaks against
itself; a pod that somebody took away does not. A node is *closed* when somebody
else wants nothing new on its host, or says that it is broken. What has changed is
reported at once, and what is gone is reported again and again: an agent that came back for
a moment wipes it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from controller.core.node_events import (
    NodeBack,
    NodeClosed,
    NodeEvent,
    NodeGone,
    NodeLocated,
    NodesAwaited,
)
from controller.core.states import AWAY
from controller.core.topology import of_labels
from controller.kube.conditions import ClosingCondition, fault_of
from controller.kube.observed import Pod
from controller.kube.quarantine import closed_by_others, evicted_by_others
from controller.kube.view import View
from outlast.ids import NodeId

TELL_AGAIN_S = 5.0
_MAX_WORDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    detail: str
    blames_host: bool


class HostEvents:
    """Remembers what was reported, and reports what is new."""

    def __init__(
        self,
        fleet: str,
        tolerations: tuple[Mapping[str, object], ...],
        closing: tuple[ClosingCondition, ...],
        topology_labels: tuple[str, ...],
    ) -> None:
        """`closing` are the conditions of hosts by which others close them; `topology_labels`
        name the domains in which a host stands."""
        self._fleet = fleet
        self._tolerations = tolerations
        self._closing = closing
        self._topology_labels = topology_labels
        self._located: dict[NodeId, str] = {}
        # Hosts of this cluster that were ever seen: of others, agents started by hand, the
        # cluster knows nothing.
        self._known: dict[NodeId, None] = {}
        self._gone: dict[NodeId, tuple[_Loss, float]] = {}
        self._closed: dict[NodeId, NodeClosed] = {}
        self._awaited = ""

    def events(self, view: View) -> list[NodeEvent]:
        """What must be reported to the machine now."""
        self._known.update(dict.fromkeys(view.hosts))
        events: list[NodeEvent] = [*self._moved(view)]
        for name, node in view.nodes.items():
            if node.state in AWAY or name not in self._known:
                self._gone.pop(name, None)
                continue
            loss = self._loss(view, name)
            events += self._tell_gone(name, loss, view)
            closed = self._closing_of(view, name, loss)
            if closed != self._closed.get(name, NodeClosed(node=name, reason="")):
                self._closed[name] = closed
                events.append(closed)
        return events

    def awaited(self, on_the_way: list[Pod], refusal: str) -> list[NodesAwaited]:
        """How it stands with pods that are no nodes yet, if that has changed.

        `refusal` is why others that are wanted cannot even be made, "" when they can.
        """
        messages = (refusal and f"a pod cannot be made: {refusal}", _message_for(on_the_way))
        detail = "; ".join(filter(None, messages))[:_MAX_WORDS]
        if detail == self._awaited:
            return []
        self._awaited = detail
        return [NodesAwaited(detail=detail)]

    def is_usable(self, name: NodeId) -> bool:
        """Whether, by the last look, nothing spoke against a new place on a node."""
        closed = self._closed.get(name)
        return name not in self._gone and (closed is None or not closed.reason)

    def _moved(self, view: View) -> Iterator[NodeLocated]:
        """Hosts, of nodes that may be still to come, whose labels say something new."""
        for name, host in view.hosts.items():
            where = of_labels(host.labels, self._topology_labels)
            if where != self._located.get(name, ""):
                self._located[name] = where
                yield NodeLocated(node=name, topology=where)
        for name in [each for each in self._located if each not in view.hosts]:
            node = view.nodes.get(name)
            if node is None or node.state in AWAY:
                del self._located[name]
                yield NodeLocated(node=name, topology="")

    def _tell_gone(self, name: NodeId, loss: _Loss | None, view: View) -> list[NodeEvent]:
        reported = self._gone.get(name)
        if loss is None:
            if reported is None:
                return []
            del self._gone[name]
            return [NodeBack(node=name)]
        if reported is not None and reported[0] == loss and view.now_s < reported[1] + TELL_AGAIN_S:
            return []
        self._gone[name] = (loss, view.now_s)
        return [
            NodeGone(node=name, detail=loss.detail, at_s=view.wall_s, blames_host=loss.blames_host)
        ]

    def _loss(self, view: View, name: NodeId) -> _Loss | None:
        host, pod = view.hosts.get(name), view.pod_on(name)
        if host is None:
            # It may come back under the same name as another machine.
            return _Loss(detail="its host was removed from the cluster", blames_host=False)
        if host.not_ready:
            return _Loss(detail=f"its host is not ready: {host.not_ready}", blames_host=True)
        evicted = evicted_by_others(host, self._fleet, self._tolerations)
        why = evicted or _pod_trouble(pod)
        return _Loss(detail=why, blames_host=False) if why else None

    def _closing_of(self, view: View, name: NodeId, loss: _Loss | None) -> NodeClosed:
        if (host := view.hosts.get(name)) is not None:
            if fault := fault_of(host, self._closing):
                return NodeClosed(node=name, reason=fault, is_broken=True)
            if why := closed_by_others(host, self._fleet, self._tolerations):
                return NodeClosed(node=name, reason=why)
        return NodeClosed(node=name, reason="" if loss is None else loss.detail)


def _pod_trouble(pod: Pod | None) -> str:
    if pod is None:
        return "its pod was deleted"
    why = f" ({pod.detail})" if pod.detail else ""
    if pod.deleting:
        return f"its pod {pod.name} is being deleted{why}"
    return "" if pod.is_alive else f"its pod {pod.name} has {pod.phase.lower()}{why}"


def _message_for(on_the_way: list[Pod]) -> str:
    """Such as `3 pods are on the way; outlast-agent-2 is Pending: Unschedulable: …`."""
    if not on_the_way:
        return ""
    reported = [pod for pod in sorted(on_the_way, key=lambda pod: pod.name) if pod.detail]
    count = len(on_the_way)
    message = f"{count} pod{'s are' if count > 1 else ' is'} on the way"
    held = [pod for pod in on_the_way if pod.gates]
    if held:
        gates = ", ".join(dict.fromkeys(gate for pod in held for gate in pod.gates))
        return f"{message}, {len(held)} not admitted to the cluster yet: {gates}"
    if reported:
        where = f" on {reported[0].host}" if reported[0].host else ""
        message += f"; {reported[0].name}{where} is {reported[0].phase}: {reported[0].detail}"
    return message
