"""The cluster that runs the nodes of a simulated world.

It may report a node's end, take nodes away, bring new ones late or not at all, and want
nodes back that nobody needs. What it says, a controller that starts hears again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.core.node_events import (
    NodeBack,
    NodeClosed,
    NodeGone,
    NodeReleased,
    NodeReplaced,
    NodesAwaited,
)
from controller.core.records import NodeRecord
from controller.core.spares import spares_wanted
from controller.core.states import EXCLUDED, NodeState
from outlast.ids import NodeId

if TYPE_CHECKING:
    from controller.sim.world import World

# Asked for more nodes than this at once, it brings the rest later.
MAX_AT_ONCE = 3


class Cluster:
    """What runs the nodes."""

    def __init__(self, world: World, *, provisions: bool, keeps_pool: bool) -> None:
        self._world = world
        self.provisions = provisions
        self._keeps_pool = keeps_pool
        # No room for another node, for now.
        self.is_full = False
        # How many times as long as usual everything takes.
        self.slowness = 1.0
        self.num_brought = 0
        self._gone: dict[NodeId, NodeGone] = {}
        self._closed: dict[NodeId, str] = {}
        # Of the closed ones, hosts that are called broken, and since when.
        self.broken: dict[NodeId, float] = {}
        self._awaited = ""
        self._num_coming = 0
        self._num_gone = 0

    @property
    def brings_nodes(self) -> bool:
        """Whether nodes may come that have what the present ones lack."""
        return self.provisions or self._keeps_pool

    def tell_all(self) -> None:
        """What a listing says, to a controller that starts."""
        controller = self._world.controller
        controller.handle(NodesAwaited(detail=self._awaited))
        for node, reason in list(self._closed.items()):
            controller.take_closed(self._closing_of(node, reason))
        for event in list(self._gone.values()):
            if controller.machine is not None and event.node in controller.machine.state.nodes:
                controller.handle(event)

    def report_gone(self, node: NodeId, detail: str) -> None:
        """Say that a machine which is off does not exist any more."""
        if self._world.nodes[node].is_on:
            return
        self._num_gone += 1
        event = NodeGone(
            node=node,
            detail=detail,
            at_s=self._world.now_s,
            # A person took every other one away; its host has done nothing.
            blames_host=self._num_gone % 2 == 0,
        )
        self._gone[node] = event
        self._world.checkers.suspect(node, "gone")
        self._world.controller.handle(event)

    def returned(self, node: NodeId) -> None:
        if self._gone.pop(node, None) is not None:
            self._world.controller.handle(NodeBack(node=node))

    def close(self, node: NodeId, reason: str, *, is_broken: bool = False) -> None:
        """Others want nothing new on the host; an empty reason opens it again."""
        self._closed.pop(node, None)
        self.broken.pop(node, None)
        if reason:
            self._closed[node] = reason
        if is_broken:
            self.broken[node] = self._world.now_s
        self._world.controller.take_closed(self._closing_of(node, reason))

    def _closing_of(self, node: NodeId, reason: str) -> NodeClosed:
        return NodeClosed(node=node, reason=reason, is_broken=node in self.broken)

    def want_back(self, node: NodeId) -> None:
        """Take a node back if the machine lets it go."""
        controller = self._world.controller
        controller.handle(NodeReleased(node=node))
        machine = controller.machine
        if machine is None or node not in machine.state.nodes:
            return
        if machine.state.nodes[node].state is NodeState.RELEASED:
            self._world.kill_node(node, why="the cluster took it back")

    def recover(self) -> None:
        """There is room again, and nobody minds new work anywhere."""
        self.is_full, self.slowness = False, 1.0
        for node in list(self._closed):
            self.close(node, "")
        self._say_awaited()

    def replace(self, node: NodeId) -> None:
        """Another machine gets the name of one that was given up."""
        self._world.controller.handle(NodeReplaced(node=node))
        self._world.repair_node(node)

    def evict(self, node: NodeId) -> None:
        self._world.kill_node(node, why="evicted")

    def provision(self, count: int) -> None:
        """New machines take minutes to come; one request at a time is served."""
        if self._keeps_pool:
            self.fill_pool()
        elif self.provisions and not self._num_coming:
            self._bring(min(count, MAX_AT_ONCE))

    def decided(self, node: NodeRecord) -> None:
        """The machine has decided about a node; one that the pool loses is made up for soon."""
        if self._keeps_pool and node.state in EXCLUDED:
            self._world.timeline.after(1.0, self.fill_pool)

    def fill_pool(self) -> None:
        """Bring what the pool lacks: the rule of `controller.kube`, in virtual time."""
        machine = self._world.controller.machine
        if machine is None:
            return
        jobs = machine.state.jobs.values()
        wanted = sum(spares_wanted(jobs).values())
        wanted += sum(job.plan.wanted_nodes for job in jobs if job.wants_nodes)
        # Nodes that have a machine but have not joined yet are there for this purpose.
        known = machine.state.nodes
        usable = sum(node.state not in EXCLUDED for node in known.values())
        joining = sum(name not in known for name in self._world.nodes)
        self._bring(wanted - usable - joining - self._num_coming)

    def _bring(self, count: int) -> None:
        for _ in range(count):
            self._num_coming += 1
            delay_s = self._world.pace.provision_s() * self.slowness
            self._world.timeline.after(delay_s, self._came)
        self._say_awaited()

    def _came(self) -> None:
        if self.is_full:
            self._world.timeline.after(self._world.pace.provision_s(), self._came)
            return
        self._num_coming -= 1
        self.num_brought += 1
        self._world.add_node()
        self._say_awaited()

    def _say_awaited(self) -> None:
        room = "the cluster has no room for" if self.is_full else "the cluster brings"
        detail = f"{room} {self._num_coming} node(s)" if self._num_coming else ""
        if detail != self._awaited:
            self._awaited = detail
            self._world.controller.handle(NodesAwaited(detail=detail))
