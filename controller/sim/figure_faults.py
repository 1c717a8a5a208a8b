"""What shows in the figures of steps: batches and nodes that spoil them, nodes that are slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from controller.sim.checkers import NON_FINITE
from controller.sim.victims import some_node, some_training
from controller.sim.world import World
from outlast.failures import FailureClass
from outlast.ids import NodeId
from outlast.worker_contract import KILLED


def _bad_batch(world: World) -> None:
    """The next step gives NaN, now and whenever its batch is read again."""
    training = some_training(world)
    if training is None:
        return
    job = training.job
    step = training.completed(world.now_s) + 2
    if job.nan_step is None and step <= job.last_step:
        job.nan_step = step
        training.joined[0].end(KILLED, FailureClass.KILLED_BY_SIGNAL)


def _spike(world: World) -> None:
    """The loss of a step far ahead stands out, whenever its batch is read again."""
    training = some_training(world)
    if training is not None and training.job.spike_step is None:
        # There must be enough steps before it for it to stand out from.
        step = training.completed(world.now_s) + world.random.randint(40, 80)
        if step <= training.job.last_step:
            training.job.spike_step = step
            world.trainings.plan_anew(training)


def _slow_node(world: World) -> None:
    """A node takes its time, and all that train with it wait for it at every step."""
    name = some_node(world, used=True)
    node, random = world.nodes[name], world.random
    node.slowness = random.choice((1.5, 3.0))
    node.sickness = "its clocks are throttled"
    world.checkers.suspect(name, "slow")
    world.trainings.set_pace(name)
    world.timeline.after(random.uniform(3600.0, 10_800.0), world.repair_node, name)


def _corrupt_node(world: World) -> None:
    """A node gives NaN now and then, and a finite loss when the step is done again."""
    training = some_training(world)
    if training is None:
        return
    name = world.random.choice(list(training.joined.values())).node
    world.nodes[name].is_corrupt = world.random.random() < 0.5
    for _ in range(world.random.randint(1, 3)):
        delay_s = world.random.uniform(0.0, 3600.0)
        world.timeline.after(delay_s, _no_number_once, world, name)
    world.timeline.after(world.random.uniform(3600.0, 7200.0), world.repair_node, name)


def _no_number_once(world: World, name: NodeId) -> None:
    agent = world.nodes[name].agent
    workers = [] if agent is None else agent.running()
    for worker in workers[:1]:
        training = world.trainings.get(worker.job_id, worker.attempt)
        if training is not None and training.is_training:
            world.checkers.suspect(name, NON_FINITE)
            world.trainings.figures.lose_number(worker)


FIGURE_FAULTS: Mapping[str, tuple[float, Callable[[World], None]]] = {
    "bad batch": (1.5, _bad_batch),
    "spike": (1, _spike),
    "slow node": (1, _slow_node),
    "corrupt node": (2, _corrupt_node),
}
