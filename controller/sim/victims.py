"""What faults strike: nodes in use, and of a seed's world a random attempt or machine."""

from __future__ import annotations

from controller.core.states import PLACED
from controller.sim.attempt import Training
from controller.sim.world import World
from outlast.failures import FailureClass
from outlast.ids import NodeId
from outlast.worker_contract import KILLED


def some_training(world: World) -> Training | None:
    """An attempt that trains, if one does."""
    live = world.trainings.live()
    return world.random.choice(live) if live else None


def in_use(world: World) -> list[NodeId]:
    """Nodes that serve a job, as the journal has it: the controller may be dead."""
    nodes = world.controller.journal.folded.nodes
    return [name for name, node in nodes.items() if node.state in PLACED]


def is_in_use(world: World, name: NodeId) -> bool:
    """Whether the node is one of those."""
    node = world.controller.journal.folded.nodes.get(name)
    return node is not None and node.state in PLACED


def some_node(world: World, *, used: bool | None = None) -> NodeId:
    """A machine that is on; with `used`, one that does or does not serve a job if there is one."""
    names = [name for name, node in world.nodes.items() if node.agent is not None]
    if not names:
        return next(iter(world.nodes))
    if used is not None:
        serving = set(in_use(world))
        names = [name for name in names if (name in serving) == used] or names
    return world.random.choice(names)


def kill_worker_of(world: World, node: NodeId) -> None:
    """One of the node's workers dies, if it has any."""
    agent = world.nodes[node].agent
    workers = [] if agent is None else agent.running()
    if workers:
        world.random.choice(workers).end(KILLED, FailureClass.KILLED_BY_SIGNAL)
