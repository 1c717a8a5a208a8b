"""Quarantines of hosts: which are missing, which are over, and which may be tried again."""

from __future__ import annotations

from collections.abc import Mapping

from controller.core.events import NodeEvent, NodeUncordonRequested
from controller.core.records import NodeRecord
from controller.core.states import NodeState
from controller.kube import quarantine
from controller.kube.actions import Action, PatchHost
from controller.kube.view import View
from outlast.ids import NodeId

# Hosts that are tried again at the same time.
MAX_PROBES = 4


class Quarantines:
    """Compares the sessions of the machine with the marks on hosts."""

    def __init__(
        self, fleet: str, tolerations: tuple[Mapping[str, object], ...], probe_s: float
    ) -> None:
        """`probe_s` is how long after its loss a host is tried again."""
        self._fleet = fleet
        self._tolerations = tolerations
        self._probe_s = probe_s
        # Sessions whose host was tried again: once, then a person must look at it.
        self._probed: dict[str, None] = {}

    def compare(self, view: View) -> tuple[list[NodeEvent], list[Action]]:
        """Close the hosts of nodes in quarantine, open those that are not any more."""
        events: list[NodeEvent] = []
        actions: list[Action] = []
        for host in view.hosts.values():
            # Of a node that the journal has never seen nothing is known: only a person
            # may open its host again.
            node = view.nodes.get(host.name)
            if node is None or quarantine.is_anothers(host, self._fleet):
                continue
            session = quarantine.session_of(host, self._fleet)
            if node.quarantine and session != node.quarantine:
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
                patch = quarantine.release_patch(host)
                actions.append(PatchHost(host=host.name, patch=patch, what="release"))
        return events, actions

    def to_probe(self, view: View) -> list[NodeRecord]:
        """Nodes that were lost and whose hosts work again.

        Only those that the cluster alone called bad. Where our own checks failed, or nobody
        was heard of for hours, a person must act.
        """
        self._probed.update(dict.fromkeys(pod.probes for pod in view.pods if pod.probes))
        due = [
            node
            for node in view.nodes.values()
            if node.state is NodeState.RETIRED
            and node.quarantine not in ("", *map(node.session_of, node.quarantines_s))
            and node.quarantine not in self._probed
            and view.wall_s > node.since_s + self._probe_s
            and view.pod_on(node.node) is None
            and self._works(view, node.node)
        ]
        running = sum(bool(pod.probes) for pod in view.pods)
        return due[: max(0, MAX_PROBES - running)]

    def _works(self, view: View, name: NodeId) -> bool:
        """Whether a host is ready, and closed by nobody but us."""
        host = view.hosts.get(name)
        return (
            host is not None
            and not host.not_ready
            and bool(quarantine.session_of(host, self._fleet))
            and not quarantine.closed_by_others(host, self._fleet, self._tolerations)
        )
