"""The virtual world of one seed: nodes, jobs, the network, the cluster, the controller.

It offers what faults do to it as plain methods; `faults` decides when. Everything
random comes from one `Random`, so that a seed replays exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from controller.core import events as ev
from controller.core.capacity import Capacity
from controller.core.edge.liveness import Limits
from controller.core.edge.settings import NO_JOB
from controller.core.kinds import NonFiniteAgain, Rung
from controller.core.records import JobPlan, Size
from controller.core.states import TERMINAL
from controller.sim.agent import Agent
from controller.sim.attempt import Phase, SimJob, Training
from controller.sim.checkers import Checkers
from controller.sim.cluster import Cluster
from controller.sim.controller import Controller
from controller.sim.network import Network, Session
from controller.sim.node import Node
from controller.sim.pace import WHOLE, Fidelity, Pace
from controller.sim.timeline import EPOCH_S, Timeline
from controller.sim.trace import Tracer
from controller.sim.training import Trainings
from outlast.failures import FailureClass
from outlast.ids import JobId, NodeId
from outlast.worker_contract import WorkerExitCode

DEFAULT_LIMITS = Limits()
# Of devices that break without a report of their own, those whose ranks' peers fail as they do.
PEER_FAILS_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a world is and how many jobs it has."""

    num_nodes: int
    workers_per_node: int
    jobs: tuple[SimJob, ...]
    # Whether the cluster brings new nodes when the machine asks.
    provisions: bool
    # Whether the cluster keeps as many nodes as the jobs and their standbys need, unasked.
    keeps_pool: bool = False
    fidelity: Fidelity = WHOLE
    limits: Limits = DEFAULT_LIMITS
    # How often agents of nodes without a job are to send a heartbeat; the limits are for that.
    heartbeat_s: float = NO_JOB.heartbeat_period_s
    # What the first nodes have, in their order, and what those have that come later; None where
    # agents do not say.
    capacities: tuple[Capacity, ...] = ()
    later_capacity: Capacity | None = None
    # Of nodes that are not told to stand elsewhere: how many there are to a rack; 0: nobody says.
    rack_nodes: int = 0


class World:
    """Everything of one seed."""

    def __init__(
        self, seed: int, shape: Shape, *, pace: Pace | None = None, trace: bool = False
    ) -> None:
        self.random = Random(seed)
        self.pace = pace or Pace(self.random)
        self.fidelity = shape.fidelity
        self.limits, self.heartbeat_s = shape.limits, shape.heartbeat_s
        self.timeline = Timeline()
        self.tracer = Tracer(self.timeline, on=trace)
        self.trace = self.tracer.line
        self.network = Network(self.timeline, self.random)
        self.network.on_agent_lost = self._agent_lost
        self.network.on_controller_lost = self._controller_lost
        self.checkers = Checkers(self)
        self.trainings = Trainings(self)
        self.cluster = Cluster(self, provisions=shape.provisions, keeps_pool=shape.keeps_pool)
        self.jobs: dict[JobId, SimJob] = {job.job_id: job for job in shape.jobs}
        self.nodes: dict[NodeId, Node] = {}
        # Faults that had an effect.
        self.struck: list[str] = []
        # Nodes that their peers do not reach.
        self.isolated: set[NodeId] = set()
        # Pairs that do not work with each other.
        self.bad_links: list[tuple[NodeId, NodeId]] = []
        self._workers_per_node = shape.workers_per_node
        self._capacities, self._later_capacity = shape.capacities, shape.later_capacity
        self._rack_nodes = shape.rack_nodes
        # Since when a node is not heard; nodes that beat are absent.
        self._quiet: dict[NodeId, float] = {}
        self._beating: dict[NodeId, float] = {}
        self.controller = Controller(self)
        self.controller.start()
        for _ in range(shape.num_nodes):
            self.add_node()

    @property
    def now_s(self) -> float:
        return self.timeline.now_s

    @property
    def num_changes(self) -> int:
        """How much was reported, decided or planned: whatever changes the world adds to it."""
        num_changes = self.controller.journal.num_changes
        return self.timeline.num_asked + self.tracer.num_lines + num_changes

    @property
    def hours(self) -> float:
        return (self.now_s - EPOCH_S) / 3600.0

    # Heartbeats: nobody sends them, but everybody knows whether they would arrive

    def is_beating(self, node: NodeId) -> bool:
        """Whether heartbeats of the node reach the controller just now."""
        agent = self.nodes[node].agent
        if agent is None or agent.session is None or self.network.is_cut(node):
            return False
        return self.controller.sessions.get(node) is agent.session

    def pulse(self, node: NodeId) -> None:
        """Something about a node's line has changed: say so to those who watch silence."""
        beats = self.is_beating(node)
        if beats and node in self._quiet:
            self.checkers.silent_for(node, self._quiet.pop(node))
            self._beating[node] = self.now_s
            self.controller.heartbeats.beats(node)
        elif not beats and node not in self._quiet:
            self._quiet[node] = self.now_s
            self.controller.heartbeats.quiet(node)

    def all_well(self, training: Training) -> bool:
        """Whether an attempt seems to train and the heartbeats of all its nodes arrive."""
        seems_to = training.phase in (Phase.RUNNING, Phase.SPOILED)
        return seems_to and training.members.isdisjoint(self._quiet)

    def quiet_nodes(self) -> Mapping[NodeId, float]:
        """Nodes that are not heard, and since when."""
        return self._quiet

    def beating_since(self, node: NodeId) -> float:
        """When the heartbeats of a node that beats began again."""
        return self._beating.get(node, EPOCH_S)

    def quiet_since(self, node: NodeId) -> float | None:
        return self._quiet.get(node)

    def reconnect_soon(self, agent: Agent) -> None:
        self.pulse(agent.node.name)
        self.timeline.after(self.random.uniform(0.05, 2.5), agent.connect)

    def controller_is_up(self) -> None:
        for node in self.nodes.values():
            if node.agent is not None and node.agent.session is None:
                self.reconnect_soon(node.agent)

    def _agent_lost(self, session: Session) -> None:
        agent = self.nodes[session.node].agent
        if agent is not None:
            agent.lost(session)

    def _controller_lost(self, session: Session) -> None:
        self.controller.lost(session)
        self.pulse(session.node)

    # Nodes

    def add_node(self) -> None:
        """A new machine joins."""
        number = len(self.nodes) + 1
        name = NodeId(f"n{number:02d}")
        self.nodes[name] = Node(
            name=name,
            number=number,
            workers=self._workers_per_node,
            capacity=self._capacity_of(number),
        )
        self._quiet[name] = self.now_s
        self.start_agent(name)

    def _capacity_of(self, number: int) -> Capacity | None:
        known = number <= len(self._capacities)
        capacity = self._capacities[number - 1] if known else self._later_capacity
        if self._rack_nodes and (capacity is None or not capacity.topology):
            rack = f"rack-{(number - 1) // self._rack_nodes}"
            capacity = replace(capacity or Capacity(), topology=rack)
        return capacity

    def start_agent(self, name: NodeId) -> None:
        """An agent starts on a machine that is on and has none."""
        node = self.nodes[name]
        if not node.is_on or node.agent is not None:
            return
        self.cluster.returned(name)
        node.agent = Agent(self, node)
        node.agent.begin()
        self.trace("agent", name, f"started as {node.agent.incarnation}")
        self.reconnect_soon(node.agent)

    def kill_agent(self, name: NodeId, *, back_s: float | None) -> None:
        """The agent process dies; its workers with it, its node's memory stays."""
        node = self.nodes[name]
        if node.agent is None:
            return
        self.trace("agent", name, "died")
        session = node.agent.session
        node.agent_dies(silently=False)
        if session is not None:
            session.open_at_agent = False
            self.network.drop(session, at_agent=False, at_controller=not self.network.is_cut(name))
        self.pulse(name)
        if back_s is not None:
            self.timeline.after(back_s, self.start_agent, name)

    def stop_agent(self, name: NodeId, *, back_s: float) -> None:
        """The agent is asked to end: it says goodbye, and takes its workers along."""
        agent = self.nodes[name].agent
        if agent is None:
            return
        self.trace("agent", name, "is stopped in order")
        agent.say_goodbye()
        # It waits for an answer within a limit, and then for its workers.
        self.timeline.after(self.random.uniform(0.05, 3.0), self._end_agent, agent, back_s)

    def _end_agent(self, agent: Agent, back_s: float) -> None:
        if not agent.is_alive:
            return
        self.kill_agent(agent.node.name, back_s=back_s)
        if not agent.node.is_stuck:
            agent.node.left = agent.incarnation

    def kill_node(self, name: NodeId, *, why: str) -> None:
        """The machine goes dark: no process ends in an orderly way, memory is gone."""
        node = self.nodes[name]
        if not node.is_on:
            return
        self.trace("node", name, f"off: {why}")
        node.is_on = False
        session = None if node.agent is None else node.agent.session
        node.agent_dies(silently=True)
        node.lose_memory()
        node.ledger.clear()
        node.stopped.clear()
        node.left = ""
        if session is not None:
            session.open_at_agent = False
            # Nobody says goodbye; the controller may or may not notice.
            notices = self.random.random() < 0.5
            self.network.drop(session, at_agent=False, at_controller=notices)
        self.pulse(name)

    def repair_node(self, name: NodeId) -> None:
        """A person returns the machine, empty and sound."""
        node = self.nodes[name]
        node.sickness, node.check_delay_s = "", 0.0
        if node.device_exit is FailureClass.DEVICE and node.agent is not None:
            node.agent.report_device("")
        node.device_exit = FailureClass.NONE
        node.is_corrupt = node.refuses_start = node.lacks_file = False
        node.passes_checks = node.hides_workers = False
        self.unstick(name)
        if node.slowness != 1.0:
            node.slowness = 1.0
            self.trainings.set_pace(name)
        if not node.is_on:
            node.is_on = True
            self.trace("node", name, "on again")
        self.start_agent(name)

    def break_devices(
        self, name: NodeId, why: str, *, exit_class: FailureClass, noticed_s: Callable[[], float]
    ) -> None:
        """Whoever uses the node's devices fails from here on, and so do those who run there.

        Their exits are "device" where the driver reports the fault. Where only the collective
        library fails ("nccl"), it may fail on a peer as well, and there first.
        """
        node = self.nodes[name]
        node.sickness, node.device_exit = why, exit_class
        workers = [] if node.agent is None else node.agent.running()
        if node.agent is None or not workers:
            return
        node.agent.meet_broken_devices(noticed_s)
        training = self.trainings.get(workers[0].job_id, workers[0].attempt)
        if (
            exit_class is not FailureClass.NCCL
            or training is None
            or self.random.random() > PEER_FAILS_SHARE
        ):
            return
        peers = [peer for peer in training.joined.values() if peer.node != name]
        if peers:
            peer = self.random.choice(peers)
            self.timeline.after(noticed_s(), peer.end, WorkerExitCode.FAILED, FailureClass.NCCL)

    def mend(self, link: tuple[NodeId, NodeId]) -> None:
        """Somebody has put a new cable in."""
        if link in self.bad_links:
            self.bad_links.remove(link)

    def cut(self, name: NodeId) -> None:
        """Nothing goes between the controller and the node."""
        self.trace("network", name, "cut from the controller")
        self.network.cut(name)
        self.pulse(name)

    def isolate(self, name: NodeId) -> None:
        """Nothing goes between the node and anybody, its peers neither."""
        self.isolated.add(name)
        self.cut(name)
        self.trainings.cut_from_peers(name)

    def heal(self, name: NodeId) -> None:
        self.trace("network", name, "cut ends")
        self.network.heal(name)
        if not self.network.is_cut(name):
            self.isolated.discard(name)
        self.pulse(name)
        agent = self.nodes[name].agent
        if agent is not None and agent.session is None:
            self.reconnect_soon(agent)

    def unstick(self, name: NodeId) -> None:
        """The kernel lets go: whoever was to die, dies."""
        node = self.nodes[name]
        node.is_stuck = False
        for worker in [] if node.agent is None else node.agent.running():
            training = self.trainings.get(worker.job_id, worker.attempt)
            if worker.is_stopped or training is None or training.phase is Phase.BROKEN:
                worker.kill()

    # Jobs

    def submit(self, job: SimJob) -> None:
        """A user submits a job, and tries again until the controller has it."""
        accepted = self.controller.handle(
            ev.JobSubmitted(
                job_id=job.job_id,
                name=job.job_id,
                request_id=f"request-{job.job_id}",
                spec_json="{}",
                checkpoint_url="memory://",
                plan=job.plan,
            )
        )
        if not accepted:
            self.timeline.after(30.0, self.submit, job)

    def ask(self, event: ev.Event) -> None:
        """A person asks for something, and tries again while nobody listens."""
        if not self.controller.handle(event):
            self.timeline.after(30.0, self.ask, event)

    @property
    def all_finished(self) -> bool:
        machine = self.controller.machine
        return machine is not None and all(
            job_id in machine.state.jobs and machine.state.jobs[job_id].state in TERMINAL
            for job_id in self.jobs
        )


def make_size(nodes: int) -> Size:
    """A size at which an elastic job may run; each has a spec of its own, as in production."""
    return Size(dp=nodes, nodes=nodes, spec_json=f'{{"dp": {nodes}}}')


_LADDERS = (
    (Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE),
    (Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE, Rung.PAUSE),
    (Rung.DIAGNOSE, Rung.REPLACE, Rung.PAUSE),
    (Rung.RESTART, Rung.PAUSE),
)


def make_plan(random: Random, nodes: int, workers_per_node: int, total_steps: int) -> JobPlan:
    """A plan with the defaults of `outlast.recovery.RecoverySpec`, and any ladder."""
    return JobPlan(
        nodes=nodes,
        workers_per_node=workers_per_node,
        standby=random.choice((0, 1, 1, 2)),
        total_steps=total_steps,
        retry_budget=10,
        in_place_restarts=1,
        first_step_timeout_s=1800.0,
        stop_timeout_s=60.0,
        preflight_timeout_s=300.0,
        diagnose_timeout_s=600.0,
        ladder=random.choice(_LADDERS),
        non_finite_again=random.choice(tuple(NonFiniteAgain)),
        rollback_steps=random.choice((1, 20, 100, 1000)),
        # About half of the jobs, without another draw.
        heals=total_steps % 2 == 0,
    )
