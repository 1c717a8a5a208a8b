"""What a cluster does to those who run on it: full, slow, closed hosts, nodes taken back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from controller.core.states import FREE, NodeState
from controller.sim.world import World
from outlast.ids import NodeId


def _in_states(world: World, *states: NodeState) -> NodeId | None:
    """Some node that the machine has in one of these states."""
    machine = world.controller.machine
    nodes = {} if machine is None else machine.state.nodes
    found = [name for name, node in nodes.items() if node.state in states]
    return world.random.choice(found) if found else None


def _full(world: World) -> None:
    """No room for another node, while one is lost."""
    cluster = world.cluster
    cluster.is_full = True
    world.timeline.after(world.random.uniform(600.0, 7200.0), _room_again, world)
    node = _in_states(world, NodeState.ASSIGNED)
    if node is not None:
        world.kill_node(node, why="lost in a full cluster")
        world.timeline.after(world.random.uniform(1800.0, 7200.0), world.repair_node, node)


def _room_again(world: World) -> None:
    world.cluster.is_full = False


def _slow(world: World) -> None:
    """Whatever the cluster does takes many times as long."""
    world.cluster.slowness = world.random.uniform(3.0, 10.0)
    world.timeline.after(world.random.uniform(3600.0, 14_400.0), _fast_again, world)


def _fast_again(world: World) -> None:
    world.cluster.slowness = 1.0


def _host_closed(world: World) -> None:
    """Somebody drains a host for reasons of their own, and opens it again."""
    node = _in_states(world, NodeState.ASSIGNED, *FREE)
    if node is not None:
        world.cluster.close(node, "cordoned by another controller")
        world.timeline.after(world.random.uniform(300.0, 7200.0), world.cluster.close, node, "")


def _wanted_back(world: World) -> None:
    """The cluster takes a node that nobody uses, and brings another one later."""
    node = _in_states(world, *FREE)
    if node is not None:
        world.cluster.want_back(node)
        world.timeline.after(world.random.uniform(60.0, 3600.0), world.repair_node, node)


def _replaced(world: World) -> None:
    """Another machine gets the name of one that was given up."""
    node = _in_states(world, NodeState.RETIRED, NodeState.REPAIRING)
    if node is not None and not world.nodes[node].is_on:
        world.cluster.replace(node)


CLUSTER_FAULTS: Mapping[str, tuple[float, Callable[[World], None]]] = {
    "cluster full": (1, _full),
    "cluster slow": (1, _slow),
    "host closed": (1, _host_closed),
    "node wanted back": (1, _wanted_back),
    "machine replaced": (0.7, _replaced),
}
