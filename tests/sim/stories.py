"""Directed faults: what a seed's dozen random ones meet too rarely to count on.

Each story is told by a seed, as `run_seed` is: a small fleet, a job, one thing that happens,
and the end that every world comes to, with all checkers on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from controller.core import events as ev
from controller.core.changes import State
from controller.core.kinds import Cause, Rung
from controller.core.retention import Retention, expired
from controller.core.states import JobState
from controller.sim.attempt import SimJob, Training
from controller.sim.run import end_world
from controller.sim.shapes import make_script
from controller.sim.violation import Violation
from controller.sim.world import Shape, World, make_plan
from outlast.failures import FailureClass
from outlast.ids import JobId, NodeId
from outlast.worker_contract import KILLED

Story = Callable[[int], None]

JOB = JobId("job")
HOUR_S = 3600.0
STEP_S = 10.0
WORKERS_PER_NODE = 2


def _world(
    seed: int,
    *,
    nodes: int = 3,
    heartbeat_s: float = 2.0,
    spares: int = 5,
    read_share: float = 0.0,
    copy_steps: int = 0,
    is_silent: bool = False,
) -> World:
    """A job that has been submitted, and spare nodes beside it."""
    shape = Shape(
        num_nodes=nodes + spares, workers_per_node=WORKERS_PER_NODE, jobs=(), provisions=False
    )
    world = World(seed, shape)
    plan = make_plan(world.random, nodes, WORKERS_PER_NODE, int(4 * HOUR_S / STEP_S))
    ladder = (Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE, Rung.PAUSE)
    world.jobs[JOB] = SimJob(
        job_id=JOB,
        plan=replace(plan, ladder=ladder, standby=1),
        step_s=STEP_S,
        restore_s=10.0,
        commit_every=60,
        upload_s=10.0,
        heartbeat_s=heartbeat_s,
        read_share=read_share,
    )
    if copy_steps:
        world.jobs[JOB].copy_steps = copy_steps
        world.jobs[JOB].keep_copies(dp_is_sharded=True)
    if is_silent:
        make_script(world.jobs[JOB], is_silent=True)
    world.submit(world.jobs[JOB])
    return world


def _pass(world: World, seconds: float) -> None:
    world.timeline.run_until(world.now_s + seconds)


def _state(world: World) -> State:
    assert world.controller.machine is not None
    return world.controller.machine.state


def _until(world: World, state: JobState, *, every_s: float = 0.02) -> None:
    """Go to the moment in which the job enters a state."""
    end_s = world.now_s + HOUR_S
    while JOB not in _state(world).jobs or _state(world).jobs[JOB].state is not state:
        assert world.now_s < end_s, f"the job does not become {state} within an hour"
        _pass(world, every_s)


def _begun(world: World) -> Training:
    """The job's first attempt, before its first step."""
    while not world.trainings.live():
        _pass(world, 0.5)
    (training,) = world.trainings.live()
    return training


def _trains(world: World) -> Training:
    """The job's attempt, after half an hour."""
    _begun(world)
    _pass(world, HOUR_S / 2)
    (training,) = world.trainings.live()
    return training


def _last(training: Training) -> NodeId:
    return training.nodes[-1]


def start_hangs(seed: int) -> None:
    """One rank does not get to its first step, and all others wait for it."""
    world = _world(seed)
    training = _begun(world)
    world.trainings.hang(training, training.world_size - 1)
    _pass(world, HOUR_S)
    end_world(world)


def job_hangs(seed: int) -> None:
    """All ranks stand for longer than they ever did."""
    world = _world(seed)
    training = _trains(world)
    world.trainings.hang(training, 1)
    _pass(world, HOUR_S / 2)
    end_world(world)


def hang_ends(seed: int) -> None:
    """All ranks stand for too long, and go on before it is known who holds them up."""
    world = _world(seed)
    for _ in range(4):
        training = _trains(world)
        world.trainings.hang(training, 1)
        world.timeline.after(training.stall_limit_s + 0.5, world.trainings.go_on, training)
        _pass(world, HOUR_S / 2)
    end_world(world)


def host_breaks(seed: int) -> None:
    """The cluster calls the host of a node broken on which a job trains."""
    world = _world(seed)
    node = _last(_trains(world))
    world.cluster.close(node, "its host has KernelDeadlock", is_broken=True)
    _pass(world, HOUR_S / 2)
    world.cluster.close(node, "")
    end_world(world)


def heartbeats_are_rare(seed: int) -> None:
    """A job wants few heartbeats, and its nodes are free again when it ends."""
    _periods(seed, 10.0)


def heartbeats_are_many(seed: int) -> None:
    """A job wants many heartbeats from nodes that sent fewer before."""
    _periods(seed, 0.5)


def _periods(seed: int, heartbeat_s: float) -> None:
    world = _world(seed, heartbeat_s=heartbeat_s)
    _trains(world)
    world.ask(ev.JobCancelRequested(job_id=JOB))
    _pass(world, HOUR_S / 2)
    end_world(world)


def stop_overtakes_start(seed: int) -> None:
    """Orders to start are on their way when those to stop arrive."""
    world = _world(seed, nodes=8)
    _until(world, JobState.PREFLIGHT)
    world.network.weather.reordering = 1.0
    _until(world, JobState.STARTING)
    world.ask(ev.JobPauseRequested(job_id=JOB))
    _pass(world, 60.0)
    world.network.weather.clear()
    world.ask(ev.JobResumeRequested(job_id=JOB))
    end_world(world)


def start_is_lost(seed: int) -> None:
    """An agent is restarted while it prepares a start."""
    world = _world(seed)
    _until(world, JobState.PREFLIGHT)
    for node in world.nodes.values():
        node.standby_until_s = world.now_s + HOUR_S / 10
    _until(world, JobState.STARTING)
    _pass(world, 10.0)
    node = _state(world).jobs[JOB].nodes[-1]
    assert node is not None
    world.kill_agent(node, back_s=1.0)
    _pass(world, HOUR_S / 2)
    end_world(world)


def controller_restarts_in_a_start(seed: int) -> None:
    """It dies when all nodes of a job but one have reported the first step."""
    world = _world(seed)
    training = _begun(world)
    world.cut(_last(training))
    _pass(world, STEP_S + 3.0)
    world.controller.crash_down_s = 4.0
    world.controller.crash()
    world.heal(_last(training))
    _pass(world, HOUR_S / 2)
    end_world(world)


def agent_restarts(seed: int) -> None:
    """The only agent of a job is restarted, and its workers have died with it."""
    world = _world(seed, nodes=1)
    node = _last(_trains(world))
    world.kill_agent(node, back_s=5.0)
    _pass(world, HOUR_S / 2)
    end_world(world)


def events_come_twice(seed: int) -> None:
    """What is said of an attempt comes again when the next one trains."""
    world = _world(seed)
    training = _trains(world)
    world.network.weather.duplication = 1.0
    for worker in list(training.joined.values())[:2]:
        worker.end(KILLED, FailureClass.KILLED_BY_SIGNAL)
    _pass(world, 60.0)
    world.network.weather.clear()
    _pass(world, HOUR_S / 2)
    end_world(world)


def records_expire(seed: int) -> None:
    """A job ends while one of its nodes is out of reach, and its record is old at once."""
    world = _world(seed)
    node = _last(_trains(world))
    world.cut(node)
    _pass(world, 5.0)
    world.ask(ev.JobCancelRequested(job_id=JOB))
    for _ in range(4):
        _pass(world, HOUR_S / 4)
        _expire(world)
        if JOB not in _state(world).jobs:
            _fail(world, f"the job is deleted, and {node} has not forgotten it")
    world.heal(node)
    _pass(world, HOUR_S / 4)
    _expire(world)
    if JOB in _state(world).jobs:
        _fail(world, "nothing holds the job any more, and it is not deleted")
    end_world(world)


def _fail(world: World, what: str) -> NoReturn:
    raise Violation(f"invariant 10 at {world.hours:.4f} h: {what}")


def _expire(world: World) -> None:
    limits = Retention(ended_jobs_days=1e-6)
    due = expired(_state(world), limits, world.now_s)
    world.ask(ev.RecordsExpired(jobs=due.jobs, incidents=due.incidents))


def slots_are_read(seed: int) -> None:
    """Attempts end while somebody reads what their ranks have sealed."""
    world = _world(seed, read_share=0.7)
    for _ in range(6):
        training = _trains(world)
        training.joined[0].end(KILLED, FailureClass.KILLED_BY_SIGNAL)
    end_world(world)


def node_is_lost(seed: int) -> None:
    """Nodes of a job that keeps copies are lost, one after the other."""
    world = _world(seed, copy_steps=3)
    for _ in range(3):
        world.kill_node(_last(_trains(world)), why="power loss")
        _pass(world, HOUR_S / 2)
    end_world(world)


def script_saves_while_cut_off(seed: int) -> None:
    """Seed 245: a silent script trains on where nobody sees it, and saves for the next attempt."""
    world = _world(seed, nodes=1, is_silent=True)
    node = _last(_trains(world))
    world.cut(node)
    _pass(world, HOUR_S / 2)
    world.heal(node)
    _pass(world, HOUR_S / 2)
    end_world(world)


def data_loaders_die(seed: int) -> None:
    """The processes that read data are killed, in the end so often that they stay dead."""
    world = _world(seed)
    training = _trains(world)
    for pause_s in (*(90.0,) * 3, *(5.0,) * 8):
        for name in training.nodes:
            agent = world.nodes[name].agent
            if agent is not None:
                agent.kill_data_loaders()
        _pass(world, pause_s)
    (after,) = world.trainings.live()
    if after.attempt != training.attempt:
        _fail(world, f"attempt {training.attempt} did not outlive its data loaders")
    causes = [each.cause for each in _state(world).incidents.values()]
    # Each is over when its loader has lived for a while.
    if causes.count(Cause.DATA_STALL) != 4 * len(training.nodes):
        _fail(world, f"of the data loaders' ends only {causes} are known")
    end_world(world)


def spare_dies(seed: int) -> None:
    """A free node dies while it is being checked."""
    world = _world(seed)
    end_s = world.now_s + HOUR_S
    while not (checked := _checked(world)):
        assert world.now_s < end_s, "no free node is checked within an hour"
        _pass(world, 1.0)
    world.kill_node(checked[0], why="a test")
    _pass(world, HOUR_S / 2)
    world.repair_node(checked[0])
    end_world(world)


def _checked(world: World) -> list[NodeId]:
    """Free nodes with an order to run checks."""
    orders = _state(world).commands.values()
    return [order.node for order in orders if order.job is None]


STORIES: tuple[Story, ...] = (
    start_hangs,
    job_hangs,
    hang_ends,
    host_breaks,
    heartbeats_are_rare,
    heartbeats_are_many,
    stop_overtakes_start,
    start_is_lost,
    controller_restarts_in_a_start,
    agent_restarts,
    events_come_twice,
    records_expire,
    slots_are_read,
    node_is_lost,
    script_saves_while_cut_off,
    data_loaders_die,
    spare_dies,
)
