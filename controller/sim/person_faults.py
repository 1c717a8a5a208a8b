"""What persons do while faults strike: drain, cordon, pause, cancel."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from controller.core import events as ev
from controller.core.node_events import (
    NodeCordonRequested,
    NodeDrainRequested,
    NodeUncordonRequested,
)
from controller.core.states import TERMINAL, JobState
from controller.sim.victims import some_node
from controller.sim.world import World


def drain(world: World) -> None:
    """A person drains a node, and may return it."""
    node = some_node(world, used=world.random.random() < 0.8)
    world.ask(NodeDrainRequested(node=node))
    if world.random.random() < 0.7:
        delay_s = world.random.choice((0.5, 5.0, 1800.0))
        world.timeline.after(delay_s, world.ask, NodeUncordonRequested(node=node))


def _person_cordons(world: World) -> None:
    node = some_node(world)
    world.ask(NodeCordonRequested(node=node))
    if world.random.random() < 0.5:
        world.timeline.after(3600.0, world.ask, NodeUncordonRequested(node=node))


def _person_pauses(world: World) -> None:
    job = world.random.choice(list(world.jobs))
    world.ask(ev.JobPauseRequested(job_id=job))
    delay_s = world.random.choice((0.5, 30.0, 1200.0))
    world.timeline.after(delay_s, world.ask, ev.JobResumeRequested(job_id=job))


def _person_cancels(world: World) -> None:
    machine = world.controller.machine
    states = {} if machine is None else machine.state.jobs
    open_jobs = [
        job
        for job in world.jobs
        if job in states and states[job].state not in (*TERMINAL, JobState.PAUSED)
    ]
    if len(open_jobs) > 1:
        world.ask(ev.JobCancelRequested(job_id=world.random.choice(open_jobs)))


PERSON_FAULTS: Mapping[str, tuple[float, Callable[[World], None]]] = {
    "person drains": (2, drain),
    "person cordons": (1, _person_cordons),
    "person pauses": (1.5, _person_pauses),
    "person cancels": (0.7, _person_cancels),
}
