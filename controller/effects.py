"""Does what the machine asks for, everything but the journal.

Every effect can be repeated, so nothing here remembers what it has done; what
comes of it returns to the service as an event.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol, assert_never

from controller.command_messages import NodesPacker, command_message
from controller.core.attempt_record import NodeStart
from controller.core.effects import (
    Alert,
    Effect,
    EndSearch,
    EvictNode,
    Persist,
    ProvisionNodes,
    SearchFaults,
    SendCommand,
)
from controller.core.orders import CommandRecord
from controller.sessions.session import Outgoing
from outlast.ids import NodeId
from outlast.v1 import agents_pb2

logger = logging.getLogger(__name__)

Send = Callable[[NodeId, Outgoing], bool]


class Cluster(Protocol):
    """Where nodes come from and go to."""

    def provision(self, count: int, workers: int, reason: str) -> None:
        """The fleet lacks this many nodes; get them, if that is possible."""

    def evict(self, node: NodeId, reason: str) -> None:
        """Nothing of ours may run on the node any more."""


class Searches(Protocol):
    """Who looks for what is at fault."""

    def begin(self, effect: SearchFaults) -> None:
        """Start a search, unless it is under way."""

    def end(self, search: str) -> None:
        """Stop one that is under way."""


class UnmanagedCluster:
    """Nodes that people start by hand with `outlast agent`: nobody to ask."""

    def provision(self, count: int, workers: int, reason: str) -> None:
        logger.warning("nodes wanted: count=%d workers=%d %s", count, workers, reason)

    def evict(self, node: NodeId, reason: str) -> None:
        logger.warning("node given up, stop its agent: node=%s %s", node, reason)


class Effects:
    """Carries effects out, in the order in which they are given."""

    def __init__(self, send: Send, cluster: Cluster, searches: Searches) -> None:
        self._send = send
        self._searches = searches
        self._cluster = cluster
        self._packer = NodesPacker()
        # Alerts so far, for the metrics.
        self.counts: Counter[str] = Counter()

    def use(self, cluster: Cluster) -> None:
        """Get nodes from here from now on."""
        self._cluster = cluster

    def run(self, effect: Effect) -> None:
        """Do one thing. It must already be durable that it is wanted."""
        self.counts[type(effect).__name__] += 1
        match effect:
            case Persist():
                raise AssertionError("changes are the journal's; the service appends them first")
            case SendCommand(command=command, start=start):
                if not self._send(command.node, self._message(command, start)):
                    # It is open in the journal, and sent when the node joins again.
                    logger.info("command waits for its node: command=%s", command.command_id)
            case ProvisionNodes(count=count, workers=workers, reason=reason):
                self._cluster.provision(count, workers, reason)
            case EvictNode(node=node, reason=reason):
                self._cluster.evict(node, reason)
            case SearchFaults():
                self._searches.begin(effect)
            case EndSearch(search=search):
                self._searches.end(search)
            case Alert(summary=summary):
                logger.warning("alert: %s", summary)
            case _:
                assert_never(effect)

    def _message(self, command: CommandRecord, start: NodeStart | None) -> Outgoing:
        """What is sent for a command. Orders of a large attempt are made when they are sent:
        thousands at once would take the controller's memory."""
        packed = self._packer.pack(start)

        def make() -> agents_pb2.ControllerMessage:
            return agents_pb2.ControllerMessage(command=command_message(command, start, packed))

        return make if packed else make()
