"""A simulated job whose host memory is copied between nodes loses some of them."""

from __future__ import annotations

import pytest

from controller.sim.attempt import Training
from controller.sim.scenario import JOB, Scenario, shape_of
from controller.sim.world import World

SCENARIO = Scenario(nodes=8, standbys=3, step_s=10.0, interval_s=2000.0)
HOUR_S = 3600.0


def _world(*, dp_is_sharded: bool) -> World:
    """A job of eight nodes that has trained for a while since its newest checkpoint."""
    world = World(1, shape_of(SCENARIO))
    world.jobs[JOB].keep_copies(dp_is_sharded=dp_is_sharded)
    world.submit(world.jobs[JOB])
    world.timeline.run_until(world.now_s + HOUR_S)
    return world


def _lose(world: World, node_indexes: tuple[int, ...]) -> tuple[int, Training]:
    """Lose the nodes at these indexes; the step by then, and the attempt that trains after that."""
    (training,) = world.trainings.live()
    done = training.completed(world.now_s)
    for node_index in node_indexes:
        world.kill_node(training.nodes[node_index], why="power loss")
    world.timeline.run_until(world.now_s + HOUR_S)
    (after,) = world.trainings.live()
    assert after.attempt > training.attempt
    return done, after


@pytest.mark.parametrize("node_indexes", [(3,), (1, 4)])
def test_nodes_that_do_not_keep_each_others_copies_cost_two_steps_at_most(
    node_indexes: tuple[int, ...],
) -> None:
    done, after = _lose(_world(dp_is_sharded=True), node_indexes)
    assert after.is_from_memory
    assert 0 <= done - after.resumed <= 2


def test_a_node_and_the_one_that_keeps_its_copies_cost_all_since_the_newest_checkpoint() -> None:
    done, after = _lose(_world(dp_is_sharded=True), (3, 4))
    assert not after.is_from_memory
    assert after.resumed in after.job.commits
    assert done - after.resumed > 2


def test_where_all_ranks_hold_the_same_nothing_is_lost_with_a_node_and_its_neighbour() -> None:
    done, after = _lose(_world(dp_is_sharded=False), (3, 4))
    assert after.is_from_memory
    # One rank may have been a step ahead of the others.
    assert after.resumed in (done, done + 1)
