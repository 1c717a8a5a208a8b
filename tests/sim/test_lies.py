"""Nodes that say what is not so: the job survives them, and they lose their place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.kinds import Rung
from controller.core.node_events import NodeDrainRequested
from controller.core.states import EXCLUDED, JobState
from controller.sim.attempt import SimJob
from controller.sim.node import Node
from controller.sim.world import Shape, World, make_plan
from outlast.failures import FailureClass
from outlast.ids import JobId

JOB = JobId("job")
LADDER = (Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE, Rung.PAUSE)


def _world(*, nodes: int, hours: float = 3.0) -> World:
    """A job that has trained for an hour, and spare nodes beside it."""
    step_s = 10.0
    world = World(1, Shape(num_nodes=8, workers_per_node=2, jobs=(), provisions=False))
    plan = make_plan(world.random, nodes, 2, int(hours * 3600.0 / step_s))
    world.jobs[JOB] = SimJob(
        job_id=JOB,
        plan=replace(plan, ladder=LADDER, standby=1),
        step_s=step_s,
        restore_s=10.0,
        commit_every=60,
        upload_s=10.0,
    )
    world.submit(world.jobs[JOB])
    world.timeline.run_until(world.now_s + 3600.0)
    return world


def _state(world: World) -> JobState:
    assert world.controller.machine is not None
    return world.controller.machine.state.jobs[JOB].state


def _victim(world: World) -> Node:
    (training,) = world.trainings.live()
    return world.nodes[training.nodes[0]]


def _fail(world: World, node: Node, exit_class: FailureClass = FailureClass.NCCL) -> None:
    assert node.agent is not None
    node.agent.running()[0].end(1, exit_class)


@pytest.mark.parametrize("exit_class", [FailureClass.NCCL, FailureClass.DEVICE])
def test_a_node_that_breaks_every_attempt_and_passes_its_checks_is_replaced(
    exit_class: FailureClass,
) -> None:
    """It used up the whole retry budget in place: the job was PAUSED with free nodes beside it.

    Seed 3: with the words that its workers left, which were the same each time, it failed the job.
    """
    world = _world(nodes=3)
    liar = _victim(world)
    liar.sickness, liar.device_exit, liar.passes_checks = (
        "devices fail unseen",
        exit_class,
        True,
    )
    _fail(world, liar, exit_class)
    world.timeline.run_until(world.now_s + 600.0)
    machine = world.controller.machine
    assert machine is not None
    assert _state(world) is JobState.RUNNING
    assert machine.state.nodes[liar.name].state in EXCLUDED
    assert "third fault in a row" in machine.state.nodes[liar.name].reason
    world.timeline.run_until(world.now_s + 3 * 3600.0)
    assert _state(world) is JobState.SUCCEEDED
    world.checkers.finished(machine.state)


@pytest.mark.parametrize("is_stuck", [False, True])
@pytest.mark.parametrize("nodes", [1, 3])
def test_workers_that_a_node_hides_commit_nothing_twice(nodes: int, is_stuck: bool) -> None:
    """A job of one node is the worst of them: what is hidden there is a whole attempt."""
    world = _world(nodes=nodes)
    liar = _victim(world)
    liar.hides_workers = True
    world.ask(NodeDrainRequested(node=liar.name))
    world.timeline.run_until(world.now_s + 300.0)
    liar.is_stuck = is_stuck
    commits = dict(world.jobs[JOB].commits)
    attempts = {training.attempt for training in world.trainings.live()}
    # Alone on its node the old attempt trains on beside the new one.
    assert len(attempts) == (2 if nodes == 1 else 1)
    world.timeline.run_until(world.now_s + 3 * 3600.0)
    assert _state(world) is JobState.SUCCEEDED
    assert commits.items() <= world.jobs[JOB].commits.items()
    world.repair_node(liar.name)
    machine = world.controller.machine
    assert machine is not None
    world.checkers.finished(machine.state)


def test_a_node_that_only_tells_of_lost_connections_keeps_its_place() -> None:
    """Seed 345: three times in a row nothing was known but that a rank had lost its peers."""
    world = _world(nodes=3)
    teller = _victim(world)
    for _ in range(4):
        assert teller.agent is not None
        teller.agent.running()[0].end(1, FailureClass.CASCADE)
        world.timeline.run_until(world.now_s + 240.0)
        assert _state(world) is JobState.RUNNING
    machine = world.controller.machine
    assert machine is not None
    assert machine.state.nodes[teller.name].state not in EXCLUDED
