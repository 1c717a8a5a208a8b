"""Nodes whose devices break, that go off and on, lose their switch, or say what is not so.

Nobody can keep a node from lying, so not everything is demanded of one that does: its workers
may outlive the order to stop them, beside those of a later attempt. What is demanded is that
the job survives it: whatever it says, each checkpoint is committed once, attempts go on from
what exists, and every job ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from controller.sim.victims import kill_worker_of, some_node
from controller.sim.world import World
from outlast.failures import FailureClass
from outlast.ids import NodeId

# Of devices that break, those whose workers end with the driver's own report of it.
REPORTED_SHARE = 0.7


def _device_breaks(world: World) -> None:
    """A device is gone, or its memory is bad, and the node's checks show it."""
    name = some_node(world, used=True)
    _break_devices(world, name, "uncorrectable ECC error encountered")
    world.timeline.after(world.random.uniform(1800.0, 7200.0), world.repair_node, name)


def _break_devices(world: World, name: NodeId, why: str) -> None:
    random = world.random
    exit_class = FailureClass.DEVICE if random.random() < REPORTED_SHARE else FailureClass.NCCL
    world.break_devices(
        name, why, exit_class=exit_class, noticed_s=lambda: random.uniform(0.0, 5.0)
    )


def _switch_dies(world: World) -> None:
    """Several neighbours reach neither each other, nor anybody else, for a while."""
    random, first = world.random, some_node(world, used=True)
    names = list(world.nodes)
    begin = max(0, names.index(first) - random.randint(0, 2))
    behind = tuple(names[begin : begin + random.randint(3, 8)])
    # The controller may take it for its own blindness, and does not do so twice in a row.
    world.checkers.mass_partition(behind, 0.0)
    lasts_s = random.choice((20.0, 120.0, 1200.0, 3600.0))
    for name in behind:
        world.isolate(name)
        world.timeline.after(lasts_s + random.uniform(0.0, 5.0), world.heal, name)


def _link_flaps(world: World) -> None:
    """The line to the controller goes off and on, for about as long as silence is borne."""
    _flap(world, world.cut, world.heal)


def _agent_flaps(world: World) -> None:
    """So does the agent itself, and its workers die with it each time."""

    def die(name: NodeId) -> None:
        world.kill_agent(name, back_s=None)

    _flap(world, die, world.start_agent)


def _flap(world: World, off: Callable[[NodeId], None], on: Callable[[NodeId], None]) -> None:
    node, random, limits = some_node(world, used=True), world.random, world.limits
    borders_s = (limits.late_s, limits.lost_s, limits.silent_s)
    at_s = 0.0
    for _ in range(random.randint(4, 12)):
        world.timeline.after(at_s, off, node)
        at_s += random.choice(borders_s) * random.uniform(0.8, 1.2)
        world.timeline.after(at_s, on, node)
        at_s += random.choice(borders_s) * random.uniform(0.8, 1.2)


def _hides_fault(world: World) -> None:
    """No attempt can use its devices, and all its checks pass."""
    name = some_node(world, used=True)
    world.nodes[name].passes_checks = True
    _break_devices(world, name, "devices fail unseen")
    world.timeline.after(world.random.uniform(3600.0, 14_400.0), world.repair_node, name)


def _hides_workers(world: World) -> None:
    """It says that workers have ended, and they run on; sometimes not even SIGKILL ends them."""
    name = some_node(world, used=True)
    node = world.nodes[name]
    node.hides_workers, node.is_stuck = True, world.random.random() < 0.5
    # Somebody has to ask for it: a job whose worker dies is stopped everywhere.
    kill_worker_of(world, some_node(world, used=True))
    world.timeline.after(world.random.uniform(600.0, 7200.0), world.repair_node, name)


NODE_FAULTS: Mapping[str, tuple[float, Callable[[World], None]]] = {
    "device breaks": (2, _device_breaks),
    "switch dies": (1, _switch_dies),
    "link flaps": (1, _link_flaps),
    "agent flaps": (0.7, _agent_flaps),
    "node hides its fault": (1, _hides_fault),
    "node hides its workers": (1, _hides_workers),
}
