"""Simulated jobs that do not fit: no node is lost to them, and others run there at once."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from controller.core.capacity import Capacity, NodeNeed
from controller.core.kinds import Cause
from controller.core.states import FREE, JobState
from controller.sim.attempt import SimJob
from controller.sim.timeline import EPOCH_S
from controller.sim.world import Shape, World, make_plan
from outlast.ids import JobId

GIB = 1 << 30
SMALL = Capacity(memory_bytes=8 * GIB, host_memory_bytes=4 * GIB)
LARGE = Capacity(gpus=8, memory_bytes=64 * GIB, host_memory_bytes=32 * GIB)
HOUR_S = 3600.0


def job(name: str, memory_bytes: int, *, nodes: int = 2, need: NodeNeed | None = None) -> SimJob:
    plan = make_plan(Random(1), nodes, 1, 100)
    if need is not None:
        plan = replace(plan, need=need)
    return SimJob(
        job_id=JobId(name),
        plan=plan,
        step_s=2.0,
        restore_s=2.0,
        commit_every=50,
        upload_s=5.0,
        memory_bytes=memory_bytes,
    )


def played(*jobs: SimJob, capacities: tuple[Capacity, ...], later: Capacity | None = None) -> World:
    """Submit the jobs a minute after each other and let hours pass; no other fault strikes."""
    shape = Shape(
        num_nodes=len(capacities),
        workers_per_node=1,
        jobs=jobs,
        provisions=later is not None,
        capacities=capacities,
        later_capacity=later,
    )
    world = World(7, shape)
    for number, each in enumerate(jobs):
        world.timeline.at(EPOCH_S + 60.0 * (number + 1), world.submit, each)
    world.timeline.run_until(EPOCH_S + 3 * HOUR_S)
    return world


def states(world: World) -> dict[str, JobState]:
    assert world.controller.machine is not None
    return {name: job.state for name, job in world.controller.machine.state.jobs.items()}


def assert_no_node_suffers(world: World) -> None:
    assert world.controller.machine is not None
    for node in world.controller.machine.state.nodes.values():
        assert node.state in FREE, node
        assert (node.quarantines_s, node.cordoned) == ((), False)


def test_a_job_larger_than_every_node_fails_and_the_next_one_runs() -> None:
    world = played(job("large", 5 * GIB), job("usual", GIB, nodes=3), capacities=(SMALL,) * 4)
    assert states(world) == {"large": JobState.FAILED, "usual": JobState.SUCCEEDED}
    assert_no_node_suffers(world)
    assert world.controller.machine is not None
    causes = [each.cause for each in world.controller.machine.state.incidents.values()]
    assert causes == [Cause.MISFIT]


def test_a_job_finds_the_large_nodes_of_a_mixed_fleet() -> None:
    capacities = (SMALL, LARGE, SMALL, SMALL, LARGE)
    world = played(job("large", 20 * GIB), capacities=capacities)
    assert states(world) == {"large": JobState.SUCCEEDED}
    assert_no_node_suffers(world)


def test_a_job_waits_for_the_nodes_that_the_cluster_brings() -> None:
    world = played(job("large", 20 * GIB), capacities=(SMALL, SMALL), later=LARGE)
    assert states(world) == {"large": JobState.SUCCEEDED}
    assert_no_node_suffers(world)


@pytest.mark.parametrize("need", [NodeNeed(gpus=1), NodeNeed(host_memory_bytes=20 * GIB)])
def test_a_job_that_waits_for_what_nobody_has_keeps_nothing_from_others(need: NodeNeed) -> None:
    world = played(
        job("large", GIB, need=need), job("usual", GIB, nodes=4), capacities=(SMALL,) * 4
    )
    assert states(world) == {"large": JobState.QUEUED, "usual": JobState.SUCCEEDED}
    assert_no_node_suffers(world)
