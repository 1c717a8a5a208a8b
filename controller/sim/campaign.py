"""The faults of a published mix, striking one large job at their published rate.

Arrivals are independent of each other (exponential gaps), causes are drawn by their counts,
and each strikes a random rank, or in a recovery a random one of the job's nodes: hardware breaks
whether or not somebody trains on it. Beside them, what a mix does not count: racks that lose
power, cuts of the controller's own network and its deaths, as many as asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from controller.sim.attempt import Phase, Training
from controller.sim.durations import SourcedPace
from controller.sim.mixes import Cause, Kind, Mix
from controller.sim.timeline import EPOCH_S
from controller.sim.victims import in_use, is_in_use
from controller.sim.worker import Worker
from controller.sim.world import World
from outlast.failures import FailureClass
from outlast.ids import JobId, NodeId
from outlast.worker_contract import WorkerExitCode

DAY_S = 86_400.0
# Nodes behind one switch or on one power feed.
RACK_NODES = 16
# A link that flaps is back within a retransmission; a controller's cut lasts minutes.
CUT_S = (20.0, 900.0)
# What it takes a step to strike: processes fail, hang or lose a connection over what they do in
# training, so such a fault waits for it. A published rate counts faults that were felt by a job;
# left out, those that fall into recoveries would be missing from the rate.
OF_TRAINING = (Kind.SOFTWARE, Kind.HANG, Kind.FLAP)
# Of broken GPUs, those of which the driver tells the process that uses them; of the rest only
# the collective library's failure is seen. No source says how many: the share is ours.
REPORTED_SHARE = 0.8
# How soon a fault that waits for training finds that it is back: about a step.
LOOK_EVERY_S = 5.0


class Campaign:
    """Strikes a world with a mix until its end."""

    def __init__(
        self, world: World, mix: Mix, pace: SourcedPace, *, job: JobId, days: float, seed: int
    ) -> None:
        self._world = world
        self._mix = mix
        self._pace = pace
        self._job = job
        self._seed = seed
        self.end_s = EPOCH_S + days * DAY_S
        # Of its own, so that the same faults strike whatever else a scenario changes.
        self._random = Random(f"campaign {seed}")
        self.struck: Counter[str] = Counter()
        # Of those, how many met a job that did not train just then.
        self.num_idle = 0
        self.num_planned = 0

    def plan(self, *, mass: int, only: tuple[int, ...] | None) -> None:
        """Put the whole run's faults on the timeline, or those of these numbers."""
        world = self._world
        nodes = world.jobs[self._job].plan.nodes
        gap_s = DAY_S * 1000.0 / (self._mix.per_1000_node_days * nodes)
        weights = [cause.count for cause in self._mix.causes]
        at_s = world.now_s + self._random.expovariate(1.0 / gap_s)
        while at_s < self.end_s:
            cause = self._random.choices(self._mix.causes, weights)[0]
            self._plan_one(at_s, only, self.strike, cause, self._random.random())
            at_s += self._random.expovariate(1.0 / gap_s)
        for _ in range(mass):
            for strike in (self._rack_dies, self._controller_cut, self._controller_dies):
                at_s = self._random.uniform(world.now_s, self.end_s)
                self._plan_one(at_s, only, strike)

    def _plan_one(
        self,
        at_s: float,
        only: tuple[int, ...] | None,
        strike: Callable[..., None],
        *args: object,
    ) -> None:
        if only is None or self.num_planned in only:
            self._world.timeline.at(at_s, strike, *args)
        self.num_planned += 1

    def strike(self, cause: Cause, place: float) -> None:
        """Hit the rank at this place among all, from 0 to 1, or a node of a job without ranks."""
        self._world.trace("fault", cause.name, cause.kind)
        self.struck[cause.name] += 1
        training = self._training()
        if training is None:
            self.num_idle += 1
        if cause.kind in OF_TRAINING:
            self._strike_process(cause, place)
            return
        nodes = self._nodes_of_job() if training is None else training.rank_nodes
        self._strike_node(nodes[int(place * len(nodes))], cause, place)

    def _nodes_of_job(self) -> list[NodeId]:
        """Nodes in use that are on; of the fleet where there is none."""
        nodes = self._world.nodes
        there = [name for name in in_use(self._world) if nodes[name].is_on]
        return there or [name for name, node in nodes.items() if node.is_on] or list(nodes)

    def _strike_process(self, cause: Cause, place: float) -> None:
        """Now, or as soon as the job trains."""
        training = self._training()
        if training is None:
            self._later(self._strike_process, cause, place)
            return
        self._freeze(training)
        worker = training.joined[int(place * len(training.joined))]
        match cause.kind:
            case Kind.HANG:
                self._stand(training)
            case Kind.FLAP:
                failed = WorkerExitCode.FAILED
                self._after("detect_network", worker.end, failed, FailureClass.NCCL)
            case _:
                which = f"{self._world.random.getrandbits(32):08x}"
                failed = WorkerExitCode.FAILED
                self._after("detect_process", worker.end, failed, FailureClass.USER_ERROR, which)

    def _strike_node(self, name: NodeId, cause: Cause, place: float) -> None:
        match cause.kind:
            case Kind.GPU:
                # Of the fault alone, so that it is the same whichever others are left out.
                draw = Random(f"report {self._seed} {place}").random()
                exit_class = FailureClass.DEVICE if draw < REPORTED_SHARE else FailureClass.NCCL
                self._break(name, cause, exit_class=exit_class, noticed="detect_gpu")
            case Kind.NETWORK:
                self._break(name, cause, exit_class=FailureClass.NCCL, noticed="detect_network")
            case Kind.SDC:
                node = self._world.nodes[name]
                node.sickness, node.is_corrupt = cause.name, True
                self._compute_wrongly(name, cause)
            case Kind.HOST:
                self._lose(name, cause)
            case _:
                raise AssertionError(f"{cause.kind} strikes processes, not nodes")

    def _training(self) -> Training | None:
        """The attempt that trains now, if one does."""
        return next(iter(self._world.trainings.live()), None)

    # What each kind does to a node: training stands still at once; that somebody notices takes time

    def _break(self, name: NodeId, cause: Cause, *, exit_class: FailureClass, noticed: str) -> None:
        world = self._world
        for training in list(self._world.trainings.by_attempt.values()):
            # One that restores does not get through to its first step.
            if name in training.members and training.phase in (Phase.RESTORING, Phase.RUNNING):
                self._freeze(training)
        world.break_devices(
            name, cause.name, exit_class=exit_class, noticed_s=lambda: self._pace.draw(noticed)
        )

    def _compute_wrongly(self, name: NodeId, cause: Cause) -> None:
        """Spoil the job, now or when it trains on the node, unless checks come first.

        Nobody sees it until the loss is NaN; then the step is done again by two replicas.
        """
        node, training = self._world.nodes[name], self._training()
        if not is_in_use(self._world, name) or node.sickness != cause.name:
            return
        if training is None or name not in training.members:
            self._later(self._compute_wrongly, name, cause)
            return
        self._world.trainings.freeze(training, Phase.SPOILED)
        worker = next(each for each in training.joined.values() if each.node == name)
        self._after("detect_sdc", self._show_in_loss, worker, cause)

    def _show_in_loss(self, worker: Worker, cause: Cause) -> None:
        """Unless something else ended the attempt before: then it spoils the next one."""
        if worker.is_running:
            self._world.trainings.figures.lose_number(worker)
        else:
            self._compute_wrongly(worker.node, cause)

    def _lose(self, name: NodeId, cause: Cause) -> None:
        world = self._world
        world.kill_node(name, why=cause.name)
        # The cluster knows of every other one; the rest is found out by silence.
        if self.struck[cause.name] % 2:
            self._after("detect_gpu", world.cluster.report_gone, name, cause.name)

    def _freeze(self, training: Training) -> None:
        """No step completes from here on, though no process has ended yet."""
        self._world.trainings.freeze(training, Phase.HUNG)

    def _stand(self, training: Training) -> None:
        """All ranks stand, and agents say so when that has become too long."""
        training.culprit = None
        training.stall_limit_s = self._pace.draw("detect_hang")
        self._world.controller.heartbeats.hangs(training)

    def _after(self, duration: str, action: Callable[..., None], *args: object) -> None:
        self._world.timeline.after(self._pace.draw(duration), action, *args)

    def _later(self, action: Callable[..., None], *args: object) -> None:
        """Try again soon, unless the time of faults is over by then."""
        if self._world.now_s + LOOK_EVERY_S < self.end_s:
            self._world.timeline.after(LOOK_EVERY_S, action, *args)

    # What a mix does not count

    def _rack_dies(self) -> None:
        names = sorted(in_use(self._world))
        if not names:
            return
        self.struck["rack lost power"] += 1
        rack = self._rack_of(names[self._world.random.randrange(len(names))])
        for name in names:
            if self._rack_of(name) == rack:
                self._world.kill_node(name, why="rack lost power")

    def _rack_of(self, name: NodeId) -> str:
        capacity = self._world.nodes[name].capacity
        assert capacity is not None, "a scenario says where its nodes stand"
        return capacity.topology

    def _controller_cut(self) -> None:
        """Most nodes vanish from the controller's sight at once; training goes on."""
        world = self._world
        self.struck["controller's network cut"] += 1
        lasts_s = world.random.uniform(*CUT_S)
        chosen = tuple(name for name in in_use(world) if world.random.random() < 0.9)
        world.checkers.mass_partition(chosen, lasts_s)
        for name in chosen:
            world.cut(name)
            world.timeline.after(lasts_s + world.random.uniform(0.0, 5.0), world.heal, name)

    def _controller_dies(self) -> None:
        """Between any two effects of the next few batches."""
        self.struck["controller died"] += 1
        controller, random = self._world.controller, self._world.random
        controller.crash_down_s = random.uniform(1.0, 300.0)
        controller.crash_countdown = random.randint(0, 4 * RACK_NODES)
