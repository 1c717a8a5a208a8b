"""What people do to a fleet on purpose: agents that are stopped in order, alone or all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from controller.sim.victims import some_node
from controller.sim.world import World

# Stopped in order again and again, as a laptop is that is closed every evening.
MOST_IN_A_ROW = 4
# Of the agents that are stopped, those whose goodbye is held up, and for how long.
UNHEARD_BACK_S = (5.0, 40.0)
UNHEARD_S = 4.0


def _agent_stops(world: World) -> None:
    """An agent is stopped in order, and sometimes started again."""
    node = some_node(world, used=world.random.random() < 0.8)
    back_s = world.random.choice((0.5, 5.0, 40.0, 600.0))
    if back_s in UNHEARD_BACK_S:
        # Its peers, which lose their connections to it, are heard before its goodbye.
        world.cut(node)
        world.timeline.after(UNHEARD_S, world.heal, node)
    world.stop_agent(node, back_s=back_s)


def _everything_stops(world: World) -> None:
    """The whole cluster is stopped in order, its controller first or last, and starts again."""
    at_s = 0.0
    for _ in range(world.random.randint(1, MOST_IN_A_ROW)):
        world.timeline.after(at_s, _all_at_once, world)
        at_s += world.random.uniform(200.0, 900.0)


def _all_at_once(world: World) -> None:
    random, controller = world.random, world.controller
    down_s = random.choice((5.0, 60.0, 150.0))
    for name, node in world.nodes.items():
        if node.agent is not None:
            world.stop_agent(name, back_s=down_s + random.uniform(0.0, 5.0))
    controller.crash_down_s = down_s
    world.timeline.after(random.choice((0.0, 0.1, 1.0)), controller.crash)


PLANNED_FAULTS: Mapping[str, tuple[float, Callable[[World], None]]] = {
    "agent stopped in order": (2, _agent_stops),
    "everything stopped in order": (1, _everything_stops),
}
