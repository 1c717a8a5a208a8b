"""Simulated ranks report figures, and the production detectors find what is in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.incident_record import IncidentRecord
from controller.core.kinds import Cause, Rung
from controller.core.states import IncidentState, JobState
from controller.sim.attempt import DEFAULT_MODES, SimJob, Training
from controller.sim.world import Shape, World, make_plan
from outlast.ids import JobId

JOB = JobId("job")
STEP_S = 10.0
LADDER = (Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE, Rung.PAUSE)


def _world(**modes: str) -> World:
    """A job that has trained for an hour, and spare nodes beside it."""
    world = World(1, Shape(num_nodes=8, workers_per_node=2, jobs=(), provisions=False))
    plan = make_plan(world.random, 2, 2, int(5 * 3600.0 / STEP_S))
    world.jobs[JOB] = SimJob(
        job_id=JOB,
        plan=replace(plan, ladder=LADDER, standby=1, rollback_steps=20),
        step_s=STEP_S,
        restore_s=10.0,
        commit_every=60,
        upload_s=10.0,
        modes={**DEFAULT_MODES, **modes},
    )
    world.submit(world.jobs[JOB])
    _pass(world, 3600.0)
    return world


def _pass(world: World, seconds: float) -> None:
    world.timeline.run_until(world.now_s + seconds)


def _training(world: World) -> Training:
    (training,) = world.trainings.live()
    return training


def _found(world: World, cause: Cause) -> list[IncidentRecord]:
    machine = world.controller.machine
    assert machine is not None
    return [each for each in machine.state.incidents.values() if each.cause is cause]


def _strike(world: World, *, nan: bool = False) -> int:
    """Something is odd about a step to come."""
    training = _training(world)
    step = training.completed(world.now_s) + 10
    if nan:
        training.job.nan_step = step
    else:
        training.job.spike_step = step
    world.trainings.plan_anew(training)
    return step


def test_a_calm_job_shows_nothing() -> None:
    world = _world()
    _pass(world, 5 * 3600.0)
    machine = world.controller.machine
    assert machine is not None
    assert machine.state.jobs[JOB].state is JobState.SUCCEEDED
    assert not machine.state.incidents


@pytest.mark.parametrize(("nan", "cause"), [(False, Cause.SPIKE), (True, Cause.NON_FINITE)])
def test_an_odd_step_is_noted_and_closed_when_it_does_not_come_again(
    nan: bool, cause: Cause
) -> None:
    world = _world(non_finite="log")
    step = _strike(world, nan=nan)
    _pass(world, 20 * STEP_S)
    (incident,) = _found(world, cause)
    assert f"step {step}" in incident.reason
    assert incident.state is IncidentState.OPEN
    _pass(world, 1800.0)
    (incident,) = _found(world, cause)
    assert incident.state is IncidentState.CLOSED
    assert _training(world).attempt == 1


def test_a_spike_that_acts_has_its_steps_undone_and_left_out() -> None:
    world = _world(spike="act")
    step = _strike(world)
    _pass(world, 600.0)
    training = _training(world)
    assert training.attempt == 2
    assert any(each.first <= step <= each.last for each in training.skipped)
    assert _found(world, Cause.SPIKE)


def test_a_step_without_a_number_ends_workers_only_where_that_is_to_be_acted_on() -> None:
    world = _world(non_finite="act")
    _strike(world, nan=True)
    _pass(world, 600.0)
    assert _training(world).attempt > 1


@pytest.mark.parametrize("mode", ["log", "act"])
def test_a_node_that_slows_all_others_down_is_noticed(mode: str) -> None:
    world = _world(slowdown=mode)
    training = _training(world)
    slow = world.nodes[training.nodes[1]]
    done = training.completed(world.now_s)
    slow.slowness, slow.sickness = 2.0, "its clocks are throttled"
    world.checkers.suspect(slow.name, "slow")
    world.trainings.set_pace(slow.name)
    _pass(world, 200 * STEP_S)
    if mode == "act":
        _pass(world, 4 * 200 * STEP_S)
        assert slow.name not in _training(world).nodes
    else:
        assert training.completed(world.now_s) == pytest.approx(done + 100, abs=1)
        _pass(world, 200 * STEP_S)
        (incident,) = _found(world, Cause.SLOWDOWN)
        assert incident.state is IncidentState.OPEN
        world.repair_node(slow.name)
        _pass(world, 600 * STEP_S)
        (incident,) = _found(world, Cause.SLOWDOWN)
        assert incident.state is IncidentState.CLOSED
