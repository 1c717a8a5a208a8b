"""Quarantines of hosts: which are missing, which are over, and which may be tried again."""

from __future__ import annotations

from collections.abc import Mapping

from controller.core.node_events import NodeEvent, NodeReplaced, NodeUncordonRequested
from controller.core.records import NodeRecord
from controller.core.states import NodeState
from controller.kube import conditions, quarantine
from controller.kube.actions import Action, PatchHost
from controller.kube.conditions import ClosingCondition
from controller.kube.observed import Host
from controller.kube.view import View

# Hosts that are tried again at the same time.
MAX_PROBES = 4


class Quarantines:
    """Compares the sessions of the machine with the marks on hosts."""

    def __init__(
        self,
        fleet: str,
        tolerations: tuple[Mapping[str, object], ...],
        *,
        closing: tuple[ClosingCondition, ...],
        probe_s: float,
    ) -> None:
        """`closing` are conditions of hosts that speak against a trial; `probe_s` is how
        long after its loss a host is tried again."""
        self._fleet = fleet
        self._tolerations = tolerations
        self._closing = closing
        self._probe_s = probe_s

    def compare(self, view: View) -> tuple[list[NodeEvent], list[Action]]:
        """Close the hosts of nodes in quarantine, open those that are not any more."""
        events: list[NodeEvent] = []
        actions: list[Action] = []
        tried = {pod.probes for pod in view.pods if pod.probes}
        for host in view.hosts.values():
            if quarantine.is_anothers(host, self._fleet):
                continue
            node = view.nodes.get(host.name)
            session = quarantine.session_of(host, self._fleet)
            if node is None:
                # Of a node that the journal has never seen nothing is known: only a person
                # may open its host again.
                if quarantine.human_released(host, self._fleet):
                    actions.append(_release(host))
            elif is_another_machine(host, node):
                if node.state in (NodeState.RETIRED, NodeState.REPAIRING):
                    events.append(NodeReplaced(node=host.name))
            elif node.quarantine and session != node.quarantine:
                wanted = quarantine.Quarantine(
                    session=node.quarantine,
                    fleet=self._fleet,
                    reason=node.reason,
                    since_s=node.since_s,
                )
                patch = quarantine.quarantine_patch(host, wanted)
                actions.append(PatchHost(host=host.name, patch=patch, what="quarantine"))
            elif node.quarantine and quarantine.human_released(host, self._fleet):
                events.append(NodeUncordonRequested(node=host.name))
            elif session and not node.quarantine:
                actions.append(_release(host))
            elif session in tried and not quarantine.was_tried(host, session):
                patch = quarantine.tried_patch(host, session)
                actions.append(PatchHost(host=host.name, patch=patch, what="mark of a trial"))
        return events, actions

    def to_probe(self, view: View) -> list[NodeRecord]:
        """Nodes that were lost and whose hosts work again.

        Only those that the cluster alone called bad. Where our own checks failed, or nobody
        was heard of for hours, a person must act.
        """
        tried = [pod.probes for pod in view.pods if pod.probes]
        due = [
            node
            for node in view.nodes.values()
            if node.state is NodeState.RETIRED
            and node.quarantine not in ("", *map(node.session_of, node.quarantines_s))
            and node.quarantine not in tried
            and view.wall_s > node.since_s + self._probe_s
            and view.pod_on(node.node) is None
            and self._is_to_be_tried(view, node)
        ]
        return due[: max(0, MAX_PROBES - len(tried))]

    def _is_to_be_tried(self, view: View, node: NodeRecord) -> bool:
        """Whether a host is ready, closed by nobody but us, and was not tried yet."""
        host = view.hosts.get(node.node)
        return (
            host is not None
            and not host.not_ready
            and bool(quarantine.session_of(host, self._fleet))
            and not quarantine.was_tried(host, node.quarantine)
            and not conditions.fault_of(host, self._closing)
            and not quarantine.closed_by_others(host, self._fleet, self._tolerations)
        )


def is_another_machine(host: Host, node: NodeRecord) -> bool:
    """Whether a host was added to the cluster after the quarantine of its name had begun.

    Clouds give a new machine its predecessor's name; what was wrong with that one says
    nothing of it. The same machine that somebody has added anew must pass its checks too.
    """
    return node.quarantined_s is not None and host.created_s > node.quarantined_s


def _release(host: Host) -> PatchHost:
    return PatchHost(host=host.name, patch=quarantine.release_patch(host), what="release")
