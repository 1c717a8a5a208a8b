"""Seeded plans of what goes wrong, and what is put right in the end.

Every fault is a function that does one thing to the world and arranges for its
end; a plan draws a dozen of them over half a day.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from random import Random

from controller.core import events as ev
from controller.core.node_events import NodeUncordonRequested
from controller.core.states import NodeState
from controller.sim.attempt import SimJob
from controller.sim.cluster_faults import CLUSTER_FAULTS
from controller.sim.figure_faults import FIGURE_FAULTS
from controller.sim.node_faults import NODE_FAULTS
from controller.sim.person_faults import PERSON_FAULTS, drain
from controller.sim.planned_faults import PLANNED_FAULTS
from controller.sim.timeline import EPOCH_S
from controller.sim.victims import kill_worker_of, some_node, some_training
from controller.sim.world import World
from outlast.failures import FailureClass
from outlast.ids import NodeId
from outlast.worker_contract import KILLED, WorkerExitCode

SAFETY_S = 24 * 3600.0
MIN_FAULTS = 20
# A third of all faults meets nothing once all jobs have ended.
MAX_DRAWS = 10
# A person looks at what is paused this often.
RESUME_EVERY_S = 3600.0

# Of hangs, those that end by themselves, and how long after it was noticed: about when it is
# known who is to blame.
GOES_ON_SHARE = 0.5
GOES_ON_S = (-1.0, 8.0)

Fault = Callable[[World], None]


def plan_faults(world: World, only: tuple[int, ...] | None = None) -> list[str]:
    """Put jobs and faults on the timeline; the names of the faults, in order of time.

    With `only`, the faults of other numbers do not strike.
    """
    random = world.random
    for job in world.jobs.values():
        world.timeline.at(EPOCH_S + random.uniform(5.0, 3600.0), world.submit, job)
    world.timeline.after(RESUME_EVERY_S, _resume_jobs, world)
    world.timeline.after(RESUME_EVERY_S / 2, _push_jobs, world)
    names = list(FAULTS)
    weights = [weight for weight, _ in FAULTS.values()]
    chosen = random.choices(names, weights, k=random.randint(MIN_FAULTS, MIN_FAULTS + 8))
    times = sorted(random.uniform(600.0, SAFETY_S - 600.0) for _ in chosen)
    for index in range(1, len(times)):
        # Faults like company: some strike while the last one is being dealt with.
        if random.random() < 0.35:
            times[index] = min(SAFETY_S, times[index - 1] + random.uniform(0.0, 120.0))
    struck = range(len(chosen)) if only is None else only
    for number in struck:
        world.timeline.at(EPOCH_S + times[number], _strike, world, chosen[number])
    return [chosen[number] for number in struck]


def end_faults(world: World) -> None:
    """The liveness phase: nothing breaks any more, and people have put things right."""
    world.network.weather.clear()
    world.bad_links.clear()
    world.cluster.recover()
    for job in world.jobs.values():
        job.store_up = True
    world.controller.crash_countdown = None
    world.controller.start()
    for name in list(world.nodes):
        while world.network.is_cut(name):
            world.heal(name)
        world.repair_node(name)
    for _ in range(2):
        world.add_node()
    world.timeline.after(60.0, _return_nodes, world)


def _strike(world: World, name: str) -> None:
    """Strike with a fault; where it meets nothing, as no worker is there to die, with others."""
    weights = [weight for weight, _ in FAULTS.values()]
    for _ in range(MAX_DRAWS):
        world.trace("fault", name, "")
        before = world.num_changes
        FAULTS[name][1](world)
        if world.num_changes != before:
            world.struck.append(name)
            return
        name = world.random.choices(list(FAULTS), weights)[0]


def _return_nodes(world: World) -> None:
    """A person looks through the fleet and returns what was put aside."""
    machine = world.controller.machine
    assert machine is not None
    for node in list(machine.state.nodes.values()):
        aside = node.state in (NodeState.DRAINED, NodeState.REPAIRING, NodeState.RETIRED)
        if node.cordoned or (aside and world.random.random() < 0.8):
            world.ask(NodeUncordonRequested(node=node.node))


def _resume_jobs(world: World) -> None:
    """A person resumes what is paused, for as long as the world lasts."""
    for job_id in world.jobs:
        world.ask(ev.JobResumeRequested(job_id=job_id))
    world.timeline.after(RESUME_EVERY_S, _resume_jobs, world)


def _push_jobs(world: World) -> None:
    """Before that, a person uploads what nodes of paused jobs hold in host memory."""
    for job_id in world.jobs:
        world.ask(ev.CheckpointPushRequested(job_id=job_id, checkpoint_url="", timeout_s=300.0))
    world.timeline.after(RESUME_EVERY_S, _push_jobs, world)


def _worker_dies(world: World) -> None:
    training = some_training(world)
    if training is None:
        return
    random = world.random
    worker = random.choice(list(training.joined.values()))
    failed = WorkerExitCode.FAILED
    code, exit_class, which = random.choice(
        (
            (KILLED, FailureClass.KILLED_BY_SIGNAL, ""),
            (KILLED, FailureClass.OOM_HOST, ""),
            (-signal.SIGSEGV, FailureClass.KILLED_BY_SIGNAL, ""),
            (failed, FailureClass.NCCL, ""),
            (failed, FailureClass.DEVICE, ""),
            (failed, FailureClass.STORAGE, ""),
            (failed, FailureClass.USER_ERROR, f"{random.getrandbits(32):08x}"),
            (failed, FailureClass.CUDA_OOM, ""),
            (failed, FailureClass.CASCADE, ""),
            (failed, FailureClass.UNKNOWN, ""),
        )
    )
    worker.end(code, exit_class, which)


def _worker_flaps(world: World) -> None:
    """The same node's workers die again and again."""
    node = some_node(world, used=True)
    delay_s = 0.0
    for _ in range(world.random.randint(2, 5)):
        world.timeline.after(delay_s, kill_worker_of, world, node)
        delay_s += world.random.uniform(60.0, 900.0)


def _node_dies_reported(world: World) -> None:
    node = some_node(world, used=world.random.random() < 0.8)
    world.kill_node(node, why="power loss, reported")
    delay_s = world.random.choice((0.1, 3.0, 20.0, 90.0))
    world.timeline.after(delay_s, world.cluster.report_gone, node, "instance terminated")
    _perhaps_returns(world, node)


def _node_dies_unreported(world: World) -> None:
    node = some_node(world, used=world.random.random() < 0.8)
    world.kill_node(node, why="power loss, unreported")
    _perhaps_returns(world, node)


def _perhaps_returns(world: World, node: NodeId) -> None:
    if world.random.random() < 0.5:
        delay_s = world.random.choice((30.0, 300.0, 3600.0))
        world.timeline.after(delay_s, world.repair_node, node)


def _rack_dies(world: World) -> None:
    """Many nodes at once, truly dead."""
    for _ in range(world.random.randint(3, 8)):
        node = some_node(world)
        world.kill_node(node, why="rack lost power")
        world.timeline.after(world.random.uniform(1800.0, 7200.0), world.repair_node, node)


def _agent_restarts(world: World) -> None:
    world.kill_agent(
        some_node(world, used=True), back_s=world.random.choice((0.5, 5.0, 40.0, 120.0))
    )


def _session_breaks(world: World) -> None:
    session = world.network.session(some_node(world, used=True))
    if session is not None and not session.broken:
        world.network.drop(session, at_agent=True, at_controller=world.random.random() < 0.7)


def _node_cut(world: World) -> None:
    """Only the controller loses sight of the node: its workers go on."""
    node = some_node(world, used=True)
    world.cut(node)
    lasts_s = world.random.choice((3.0, 10.0, 18.0, 40.0, 90.0, 600.0, 2500.0))
    world.timeline.after(lasts_s, world.heal, node)


def _node_isolated(world: World) -> None:
    """Nobody reaches the node any more, its peers neither."""
    node = some_node(world, used=True)
    world.isolate(node)
    world.timeline.after(world.random.choice((20.0, 120.0, 1200.0)), world.heal, node)


def _partition(world: World) -> None:
    """The controller loses sight of many nodes at once."""
    names = [name for name, node in world.nodes.items() if node.agent is not None]
    share = world.random.uniform(0.4, 1.0)
    chosen = tuple(name for name in names if world.random.random() < share)
    lasts_s = world.random.choice((15.0, 60.0, 200.0, 700.0, 2400.0))
    if world.controller.machine is not None:
        # So many at once must look like the controller's own blindness.
        counts = len(chosen) >= max(3, 0.3 * len(world.nodes)) + 1
        world.checkers.mass_partition(chosen, lasts_s if counts else 0.0)
    for node in chosen:
        world.cut(node)
        world.timeline.after(lasts_s + world.random.uniform(0.0, 5.0), world.heal, node)


def _standby_process_dies(world: World) -> None:
    """Workers go on; the next start waits for a new standby process."""
    node = world.nodes[some_node(world, used=True)]
    node.standby_until_s = world.now_s + world.random.uniform(3.0, 30.0)
    if world.random.random() < 0.5:
        kill_worker_of(world, node.name)


def _controller_dies(world: World) -> None:
    controller = world.controller
    if controller.machine is None:
        return
    controller.crash_down_s = world.random.choice((0.5, 3.0, 20.0, 120.0, 900.0, 2400.0))
    controller.crash_countdown = world.random.randint(0, 12)
    # Something to decide on, or the next effect may be an hour away.
    world.random.choice((_worker_dies, _session_breaks, _node_dies_unreported, drain))(world)


def _controller_stutters(world: World) -> None:
    """It dies at almost every effect for a while."""
    if world.controller.machine is None:
        return
    for number in range(world.random.randint(3, 8)):
        world.timeline.after(20.0 * number, _arm_crash, world)
    _worker_dies(world)


def _arm_crash(world: World) -> None:
    world.controller.crash_down_s = world.random.uniform(0.2, 8.0)
    world.controller.crash_countdown = world.random.randint(0, 5)


def _leader_deposed(world: World) -> None:
    world.controller.depose()


def _bad_weather(world: World) -> None:
    weather, random = world.network.weather, world.random
    weather.delay_s = (0.01, random.choice((0.1, 1.0, 5.0)))
    weather.loss = random.choice((0.0, 0.05, 0.3))
    weather.duplication = random.choice((0.0, 0.1, 0.5))
    weather.reordering = random.choice((0.0, 0.3, 0.8))
    world.timeline.after(random.choice((30.0, 300.0, 1500.0)), weather.clear)
    _worker_dies(world)


def _user_error(world: World) -> None:
    """From here on the job's own code fails at the next step, always."""
    training = some_training(world)
    if training is not None and training.job.error_step is None:
        step = training.completed(world.now_s) + 2
        training.job.error_step = min(step, training.job.last_step)
        training.joined[0].end(KILLED, FailureClass.KILLED_BY_SIGNAL)


def _hang(world: World) -> None:
    training = some_training(world)
    if training is not None:
        world.trainings.hang(training, world.random.randrange(training.world_size))
        if world.random.random() < 0.3:
            training.culprit = None
        # Of the attempt, so that it takes no draw of those that the rest of the story hangs on.
        draws = Random(f"{training.job.job_id} {training.attempt} {training.frozen}")
        if training.stall_limit_s and draws.random() < GOES_ON_SHARE:
            stalled_s = training.stall_limit_s + draws.uniform(*GOES_ON_S)
            world.timeline.after(stalled_s, world.trainings.go_on, training)


def _store_fails(world: World) -> None:
    job = world.random.choice(list(world.jobs.values()))
    job.store_up = False
    world.timeline.after(world.random.uniform(600.0, 7200.0), _store_recovers, job)


def _store_recovers(job: SimJob) -> None:
    job.store_up = True


def _sick(world: World) -> None:
    """The node works but fails its checks; its workers die now and then."""
    node = world.nodes[some_node(world, used=world.random.random() < 0.8)]
    node.sickness = "memory bandwidth at 40% of its baseline"
    _worker_flaps(world)
    world.timeline.after(world.random.uniform(1800.0, 7200.0), world.repair_node, node.name)


def _bad_link(world: World) -> None:
    """Two nodes of a job work with others and not with each other."""
    training = some_training(world)
    nodes = [] if training is None else list(dict.fromkeys(training.rank_nodes))
    if len(nodes) < 2:
        return
    one, other = world.random.sample(nodes, 2)
    link = (min(one, other), max(one, other))
    world.bad_links.append(link)
    for number in range(world.random.randint(2, 4)):
        world.timeline.after(300.0 * number, _fail_over, world, link)
    world.timeline.after(world.random.uniform(1800.0, 7200.0), world.mend, link)


def _fail_over(world: World, link: tuple[NodeId, NodeId]) -> None:
    """The link fails whoever still uses it."""
    if link in world.bad_links:
        kill_worker_of(world, world.random.choice(link))


def _slow_checks(world: World) -> None:
    node = world.nodes[some_node(world)]
    node.check_delay_s = world.random.choice((200.0, 400.0, 900.0))
    kill_worker_of(world, node.name)
    world.timeline.after(3600.0, world.repair_node, node.name)


def _stuck(world: World) -> None:
    """Workers hang in the kernel: SIGKILL does nothing for a while."""
    node = some_node(world, used=True)
    world.nodes[node].is_stuck = True
    world.timeline.after(world.random.choice((5.0, 100.0, 1800.0)), world.unstick, node)
    training = some_training(world)
    if training is not None:
        world.random.choice(list(training.joined.values())).end(
            WorkerExitCode.FAILED, FailureClass.NCCL
        )


def _refuses(world: World) -> None:
    """No room in host memory, or a mount that jobs read is gone: starts fail there."""
    node = some_node(world, used=True)
    # Of the name, so that it takes no draw of those that the rest of the story hangs on.
    if Random(node).random() < 0.5:
        world.nodes[node].lacks_file = True
    else:
        world.nodes[node].refuses_start = True
    world.timeline.after(world.random.uniform(600.0, 3600.0), world.repair_node, node)
    kill_worker_of(world, node)


FAULTS: Mapping[str, tuple[float, Fault]] = {
    "worker dies": (6, _worker_dies),
    "worker flaps": (2, _worker_flaps),
    "node dies, reported": (3, _node_dies_reported),
    "node dies, unreported": (3, _node_dies_unreported),
    "rack dies": (0.7, _rack_dies),
    "agent restarts": (2, _agent_restarts),
    "session breaks": (2, _session_breaks),
    "node cut": (3, _node_cut),
    "node isolated": (2, _node_isolated),
    "partition": (1.5, _partition),
    "standby process dies": (1.5, _standby_process_dies),
    "controller dies": (4, _controller_dies),
    "controller stutters": (2, _controller_stutters),
    "leader deposed": (1, _leader_deposed),
    "bad weather": (2, _bad_weather),
    **CLUSTER_FAULTS,
    **NODE_FAULTS,
    **PLANNED_FAULTS,
    "user error": (0.7, _user_error),
    **FIGURE_FAULTS,
    "hang": (2, _hang),
    "store fails": (1, _store_fails),
    "sick node": (2, _sick),
    "slow checks": (1, _slow_checks),
    "bad link": (1.5, _bad_link),
    "stuck in the kernel": (1.5, _stuck),
    "refuses starts": (1, _refuses),
    **PERSON_FAULTS,
}
