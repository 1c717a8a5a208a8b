"""A fault of a published mix strikes whatever the job does just then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from controller.core.incident_record import IncidentRecord
from controller.core.kinds import Action
from controller.core.kinds import Cause as IncidentCause
from controller.core.states import JobState
from controller.sim.campaign import Campaign
from controller.sim.durations import SourcedPace
from controller.sim.mixes import MIXES, Cause, Kind
from controller.sim.scenario import JOB, Scenario, shape_of
from controller.sim.world import World
from outlast.ids import NodeId

SCENARIO = Scenario(nodes=8, days=1.0, standbys=2)


class _Story:
    """A job that trains, and a campaign that strikes when a test says so."""

    def __init__(self) -> None:
        pace = SourcedPace(0, SCENARIO.all_durations())
        self.world = World(0, shape_of(SCENARIO), pace=pace)
        mix = MIXES[SCENARIO.mix]
        self._campaign = Campaign(self.world, mix, pace, job=JOB, days=SCENARIO.days, seed=0)
        self.world.timeline.run_until(self.world.now_s + 60.0)
        self.world.submit(self.world.jobs[JOB])
        self.until(lambda: self.state is JobState.RUNNING)

    @property
    def state(self) -> JobState:
        machine = self.world.controller.machine
        assert machine is not None
        return machine.state.jobs[JOB].state

    @property
    def incidents(self) -> list[IncidentRecord]:
        machine = self.world.controller.machine
        assert machine is not None
        return list(machine.state.incidents.values())

    @property
    def members(self) -> frozenset[NodeId]:
        """Nodes of the newest attempt."""
        by_attempt = self.world.trainings.by_attempt
        return by_attempt[max(by_attempt)].members

    def has_more_incidents(self, than: int) -> bool:
        return len(self.incidents) > than

    def strike(self, kind: Kind, place: float) -> None:
        self._campaign.strike(Cause(name=f"a {kind}", count=1, kind=kind), place)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = self.world.now_s + 4 * 3600.0
        while not condition():
            assert self.world.now_s < deadline_s
            self.world.timeline.run_until(self.world.now_s + 1.0)

    def interrupted(self) -> _Story:
        """In the middle of a recovery: the job is not there again for a minute or so."""
        self.strike(Kind.GPU, 0.0)
        self.until(lambda: self.state is JobState.DIAGNOSING)
        return self


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.NETWORK, Kind.HOST, Kind.SDC])
def test_hardware_that_breaks_during_a_recovery_is_replaced(kind: Kind) -> None:
    story = _Story().interrupted()
    world = story.world
    before = {name for name, node in world.nodes.items() if node.sickness or not node.is_on}
    story.strike(kind, 0.9)
    broken = [
        name
        for name, node in world.nodes.items()
        if name not in before and (node.sickness or not node.is_on)
    ]
    assert len(broken) == 1
    story.until(lambda: bool(world.trainings.live()))
    story.until(lambda: broken[0] not in world.trainings.live()[0].members)


def test_a_broken_gpu_is_checked_at_once_where_its_driver_reports_it() -> None:
    """Elsewhere only the collective library fails, and a restart in place is tried first."""
    story = _Story()
    seen = set()
    for place in (number / 16 for number in range(16)):
        known = len(story.incidents)
        story.strike(Kind.GPU, place)
        story.until(partial(story.has_more_incidents, known))
        story.world.timeline.run_until(story.world.now_s + 1800.0)
        # What the kernel's log says is noted first, and stops nobody.
        stopped = next(each for each in story.incidents[known:] if each.action is not None)
        seen.add((stopped.evidence[0].fault_class, stopped.action))
    assert seen == {("device", Action.SWAP_NODES), ("nccl", Action.RESTART_IN_PLACE)}


def test_silent_corruption_is_found_by_doing_its_step_again() -> None:
    """It was taken for a hang after five minutes, and the node kept its place."""
    story = _Story()
    story.strike(Kind.SDC, 0.5)
    (corrupt,) = (name for name, node in story.world.nodes.items() if node.is_corrupt)
    story.until(lambda: corrupt not in story.members)
    causes = [incident.cause for incident in story.incidents]
    assert causes == [IncidentCause.NON_FINITE, IncidentCause.SILENT_CORRUPTION]


@pytest.mark.parametrize("kind", [Kind.SOFTWARE, Kind.HANG, Kind.FLAP])
def test_a_fault_of_training_waits_until_there_is_some(kind: Kind) -> None:
    story = _Story().interrupted()
    before = story.incidents
    story.strike(kind, 0.9)
    story.until(lambda: len(story.incidents) > len(before))
    # It met the attempt that came of the recovery, and not the one that was broken already.
    assert story.incidents[-1].attempt == before[-1].attempt + 1


def test_a_gpu_that_breaks_while_state_is_restored_ends_the_attempt() -> None:
    story = _Story()
    story.strike(Kind.SOFTWARE, 0.0)
    story.until(lambda: story.state is JobState.STARTING)
    attempt = max(number for _, number in story.world.trainings.by_attempt)
    story.strike(Kind.GPU, 0.5)
    story.until(lambda: bool(story.world.trainings.live()))
    assert story.world.trainings.live()[0].attempt > attempt


def test_nodes_of_a_rack_are_neighbours_in_the_job() -> None:
    scenario = Scenario(nodes=40, standbys=0)
    pace = SourcedPace(0, scenario.all_durations())
    world = World(0, shape_of(scenario), pace=pace)
    world.submit(world.jobs[JOB])
    world.timeline.run_until(world.now_s + 3600.0)
    (training,) = world.trainings.live()
    # Nothing but what is beside the mix: a rack, a cut, and the end of the controller.
    mix = replace(MIXES[scenario.mix], per_1000_node_days=1e-9)
    campaign = Campaign(world, mix, pace, job=JOB, days=1.0, seed=0)
    campaign.plan(mass=1, only=(0,))
    while not campaign.struck:
        world.timeline.run_until(world.now_s + 1.0)
    is_off = [not world.nodes[name].is_on for name in training.nodes]
    first, num_off = is_off.index(True), sum(is_off)
    assert num_off > 1
    assert all(is_off[first : first + num_off])
