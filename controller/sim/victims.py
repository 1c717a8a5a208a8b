"""What faults of the seeds strike: a random attempt, a random machine."""

from __future__ import annotations

from controller.core.states import PLACED
from controller.sim.training import Training
from controller.sim.world import World
from outlast.ids import NodeId


def some_training(world: World) -> Training | None:
    """An attempt that trains, if one does."""
    live = world.trainings.live()
    return world.random.choice(live) if live else None


def some_node(world: World, *, used: bool | None = None) -> NodeId:
    """A machine that is on; with `used`, one that does or does not serve a job if there is one."""
    names = [name for name, node in world.nodes.items() if node.agent is not None]
    if not names:
        return next(iter(world.nodes))
    machine = world.controller.machine
    if used is not None and machine is not None:
        nodes = machine.state.nodes
        fitting = [n for n in names if n in nodes and (nodes[n].state in PLACED) == used]
        names = fitting or names
    return world.random.choice(names)


def kill_worker_of(world: World, node: NodeId) -> None:
    """One of the node's workers dies, if it has any."""
    agent = world.nodes[node].agent
    workers = [] if agent is None else agent.running()
    if workers:
        world.random.choice(workers).end(-9, "killed_by_signal", "", "killed by SIGKILL")
