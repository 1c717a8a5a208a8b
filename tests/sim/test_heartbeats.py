"""The edge finds the same in a simulation as if it had heard every heartbeat.

Heartbeats that change nothing are left out of simulations, and so are timers of the edge that
would find nothing. Here the same story is told twice, the second time with all of them.
"""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.node_events import NodeHeard, NodeLate, NodeLost, NodeSilent
from controller.sim.durations import SourcedPace
from controller.sim.heartbeats import Heartbeats
from controller.sim.ranks import heartbeat_of
from controller.sim.scenario import JOB, Scenario, shape_of
from controller.sim.world import World
from outlast.ids import NodeId
from outlast.v1 import agents_pb2

SCENARIO = Scenario(nodes=6, days=1.0, standbys=2, step_s=2.0)
# What only the edge says.
OF_EDGE = (NodeHeard, NodeLate, NodeLost, NodeSilent, ev.JobAdvanced, ev.JobStalled)
PERIOD_S = 2.0
LOOK_S = 1.0
# A silence or a stall may seem to have begun later by a heartbeat's period, or a step; with every
# message the edge looks once a second.
MAY_DIFFER_S = PERIOD_S + SCENARIO.step_s + LOOK_S


class _Story:
    """A job on six nodes, and all that its edge says, with the time."""

    def __init__(self, *, with_every_message: bool) -> None:
        pace = SourcedPace(0, SCENARIO.all_durations())
        self.world = World(0, shape_of(SCENARIO), pace=pace)
        self.said: list[tuple[float, str, str]] = []
        self._begun_s = self.world.now_s
        self._handle = self.world.controller.handle
        self.world.controller.handle = self._noted  # type: ignore[method-assign]  # and passed on
        if with_every_message:
            self._beat()
        self.until(60.0)
        self.world.submit(self.world.jobs[JOB])

    def until(self, at_s: float) -> None:
        self.world.timeline.run_until(self._begun_s + at_s)

    @property
    def node_of_job(self) -> NodeId:
        (training,) = self.world.trainings.live()
        return training.nodes[2]

    def _noted(self, event: ev.Event) -> bool:
        if isinstance(event, OF_EDGE):
            subject = (
                event.job_id if isinstance(event, ev.JobAdvanced | ev.JobStalled) else event.node
            )
            self.said.append((self.world.now_s - self._begun_s, type(event).__name__, subject))
        return self._handle(event)

    def _beat(self) -> None:
        """Every node that beats says everything, and the edge looks."""
        world, controller = self.world, self.world.controller
        for node in list(world.nodes):
            if world.is_beating(node):
                message = agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat())
                for training in world.trainings.by_attempt.values():
                    if node in training.members:
                        message = heartbeat_of(training, node, world.now_s)
                controller.take(node, message)
        controller.wake()
        world.timeline.after(LOOK_S, self._beat)


def _tell(story: _Story) -> list[tuple[float, str, str]]:
    """A cut that heals, a hang that nobody has learned to see, a long silence, and one forever."""
    world = story.world
    story.until(1000.0)
    cut = story.node_of_job
    world.cut(cut)
    story.until(1010.0)
    world.heal(cut)
    story.until(3000.0)
    (training,) = world.trainings.live()
    world.trainings.hang(training, 3)
    training.stall_limit_s = 0.0
    story.until(5000.0)
    (training,) = world.trainings.live()
    world.trainings.hang(training, 3)
    story.until(7000.0)
    free = next(
        name for name, node in world.nodes.items() if not (node.agent and node.agent.running())
    )
    world.cut(free)
    story.until(7040.0)
    world.heal(free)
    story.until(9000.0)
    world.kill_node(story.node_of_job, why="a test")
    story.until(12_000.0)
    return story.said


@pytest.fixture(scope="module")
def every() -> list[tuple[float, str, str]]:
    """What the edge says when it hears every message."""
    return _tell(_Story(with_every_message=True))


def test_edge_finds_the_same_as_with_every_heartbeat(every: list[tuple[float, str, str]]) -> None:
    left_out = _tell(_Story(with_every_message=False))
    assert [said[1:] for said in left_out] == [said[1:] for said in every]
    for (at_s, kind, subject), (then_s, *_) in zip(left_out, every, strict=True):
        assert abs(at_s - then_s) <= MAY_DIFFER_S, (kind, subject)
    assert {kind for _, kind, _ in every} == {kind.__name__ for kind in OF_EDGE}


def test_a_message_too_few_is_noticed(
    every: list[tuple[float, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the comparison is known to see what it is there for."""
    monkeypatch.setattr(Heartbeats, "_hear_last", lambda *_: None)
    left_out = _tell(_Story(with_every_message=False))
    assert [said[1:] for said in left_out] != [said[1:] for said in every]
