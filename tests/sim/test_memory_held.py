"""What a simulation holds does not grow with its attempts, nor with the square of its nodes.

Five days of 12,500 nodes took 20 GB before that was so.
"""

from __future__ import annotations

import gc
import mmap
import tracemalloc
from pathlib import Path

from controller.agent.core.buffer import EventBuffer
from controller.agent.core.ledger import CommandLedger
from controller.agent.core.machine import AgentMachine
from controller.agent.core.workers import WorkerKey
from controller.sim.attempt import Training
from controller.sim.durations import SourcedPace
from controller.sim.order import without_nodes
from controller.sim.promises import MAX_ENDS, Promises
from controller.sim.scenario import JOB, Scenario, shape_of
from controller.sim.victims import kill_worker_of
from controller.sim.world import World
from outlast.ids import NodeId
from outlast.v1 import agents_pb2

SCENARIO = Scenario(nodes=6, days=1.0, standbys=2)
HALF_AN_HOUR_S = 1800.0
# As packed for 12,500 nodes.
NODES_BYTES = 30_000


def _world() -> World:
    world = World(0, shape_of(SCENARIO), pace=SourcedPace(0, SCENARIO.all_durations()))
    world.timeline.run_until(world.now_s + 60.0)
    world.submit(world.jobs[JOB])
    return world


def test_attempts_that_are_over_are_not_kept() -> None:
    """Each was, for the last step of the job, which is decades away."""
    world = _world()
    for _ in range(6):
        world.timeline.run_until(world.now_s + HALF_AN_HOUR_S)
        (training,) = world.trainings.live()
        kill_worker_of(world, training.nodes[0])
    world.timeline.run_until(world.now_s + HALF_AN_HOUR_S)
    kept = [
        each
        for each in gc.get_objects()
        if isinstance(each, Training) and each.job is world.jobs[JOB]
    ]
    assert max(each.attempt for each in kept) > 6
    # The one that trains, and the one before it.
    assert len(kept) == 2


def test_what_is_kept_of_an_order_to_start_is_without_the_nodes_of_all_ranks() -> None:
    """A part of it is held as long as its attempt: once for each node."""
    before = _resident()
    peers = []
    for number in range(2_000):
        start = agents_pb2.StartWorkers(
            packed_nodes=bytes([number % 256]) * NODES_BYTES,
            replica_peers=[agents_pb2.ReplicaPeer(node_id=f"n{number}")],
        )
        order = without_nodes(agents_pb2.Command(start_workers=start))
        peers += order.start_workers.replica_peers
    assert len(peers) == 2_000
    assert _resident() - before < 2_000 * NODES_BYTES / 4


def test_a_checker_of_an_agent_forgets_workers_of_old_attempts() -> None:
    agent = _world().nodes[NodeId("n01")].agent
    assert agent is not None
    ledger, buffer = CommandLedger(), EventBuffer[agents_pb2.AgentEvent](1)
    promises = Promises(agent, AgentMachine(ledger, buffer, now_s=0.0))
    tracemalloc.start()
    try:
        for attempt in range(20 * MAX_ENDS):
            promises.end_reported(WorkerKey(JOB, attempt, 0))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 5 * MAX_ENDS * 200


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
