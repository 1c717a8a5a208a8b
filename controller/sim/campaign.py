"""The faults of a published mix, striking one large job at their published rate.

Arrivals are independent of each other (exponential gaps), causes are drawn by their counts,
and each strikes a random rank. Beside them, what a mix does not count: racks that lose power,
cuts of the controller's own network and its deaths, as many as asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from controller.core.states import PLACED
from controller.sim.agent import Node
from controller.sim.durations import SourcedPace
from controller.sim.mixes import Cause, Kind, Mix
from controller.sim.timeline import EPOCH_S
from controller.sim.training import Phase, Training
from controller.sim.worker import Worker
from controller.sim.world import World
from outlast.ids import JobId, NodeId

DAY_S = 86_400.0
# Nodes behind one switch or on one power feed.
RACK_NODES = 16
# A link that flaps is back within a retransmission; a controller's cut lasts minutes.
CUT_S = (20.0, 900.0)


class Campaign:
    """Strikes a world with a mix until its end."""

    def __init__(
        self, world: World, mix: Mix, pace: SourcedPace, *, job: JobId, days: float, seed: int
    ) -> None:
        self._world = world
        self._mix = mix
        self._pace = pace
        self._job = job
        self._end_s = EPOCH_S + days * DAY_S
        # Of its own, so that the same faults strike whatever else a scenario changes.
        self._random = Random(f"campaign {seed}")
        self.struck: Counter[str] = Counter()
        # Faults that met a job which was not training: nobody had anything to lose.
        self.num_idle = 0
        self.num_planned = 0

    def plan(self, *, mass: int, only: tuple[int, ...] | None) -> None:
        """Put the whole run's faults on the timeline, or those of these numbers."""
        world = self._world
        nodes = world.jobs[self._job].plan.nodes
        gap_s = DAY_S * 1000.0 / (self._mix.per_1000_node_days * nodes)
        weights = [cause.count for cause in self._mix.causes]
        at_s = world.now_s + self._random.expovariate(1.0 / gap_s)
        while at_s < self._end_s:
            cause = self._random.choices(self._mix.causes, weights)[0]
            self._plan_one(at_s, only, self._strike, cause, self._random.random())
            at_s += self._random.expovariate(1.0 / gap_s)
        for _ in range(mass):
            for strike in (self._rack_dies, self._controller_cut, self._controller_dies):
                at_s = self._random.uniform(world.now_s, self._end_s)
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

    def _strike(self, cause: Cause, place: float) -> None:
        """Hit the rank at this place among all, from 0 to 1."""
        self._world.trace("fault", cause.name, cause.kind)
        self.struck[cause.name] += 1
        training = self._training()
        if training is None:
            self.num_idle += 1
            return
        worker = training.joined[int(place * len(training.joined))]
        self._effects()[cause.kind](training, worker, cause)

    def _effects(self) -> dict[Kind, Callable[[Training, Worker, Cause], None]]:
        return {
            Kind.GPU: self._gpu,
            Kind.SDC: self._sdc,
            Kind.HOST: self._host,
            Kind.NETWORK: self._network,
            Kind.FLAP: self._flap,
            Kind.SOFTWARE: self._software,
            Kind.HANG: self._hang,
        }

    def _training(self) -> Training | None:
        """The attempt that trains now, if one does."""
        return next(iter(self._world.trainings.live()), None)

    # What each kind does: training stands still at once; that somebody notices takes time

    def _gpu(self, training: Training, worker: Worker, cause: Cause) -> None:
        self._break(worker.agent.node, cause)
        self._freeze(training)
        self._after("detect_gpu", worker.end, 1, "nccl", "", cause.name)

    def _sdc(self, training: Training, worker: Worker, cause: Cause) -> None:
        worker.agent.node.sickness = cause.name
        self._freeze(training)
        self._after("detect_sdc", worker.end, 1, "nccl", "", f"NaN: {cause.name}")

    def _host(self, training: Training, worker: Worker, cause: Cause) -> None:
        world = self._world
        world.kill_node(worker.node, why=cause.name)
        # The cluster knows of every other one; the rest is found out by silence.
        if self.struck[cause.name] % 2:
            self._after("detect_gpu", world.cluster.report_gone, worker.node, cause.name)

    def _network(self, training: Training, worker: Worker, cause: Cause) -> None:
        self._break(worker.agent.node, cause)
        self._freeze(training)
        self._after("detect_network", worker.end, 1, "nccl", "", cause.name)

    def _flap(self, training: Training, worker: Worker, cause: Cause) -> None:
        self._freeze(training)
        self._after("detect_network", worker.end, 1, "nccl", "", cause.name)

    def _software(self, training: Training, worker: Worker, cause: Cause) -> None:
        fingerprint = f"{self._world.random.getrandbits(32):08x}"
        self._freeze(training)
        self._after("detect_process", worker.end, 1, "user_error", fingerprint, cause.name)

    def _hang(self, training: Training, worker: Worker, cause: Cause) -> None:
        self._freeze(training)
        training.culprit = None
        self._after("detect_hang", self._world.controller.hang_found, training)

    def _break(self, node: Node, cause: Cause) -> None:
        node.sickness, node.is_broken = cause.name, True

    def _freeze(self, training: Training) -> None:
        """No step completes from here on, though no process has ended yet."""
        self._world.trainings.freeze(training, Phase.HUNG)

    def _after(self, duration: str, action: Callable[..., None], *args: object) -> None:
        self._world.timeline.after(self._pace.draw(duration), action, *args)

    # What a mix does not count

    def _in_use(self) -> list[NodeId]:
        machine = self._world.controller.machine
        nodes = {} if machine is None else machine.state.nodes
        return [name for name, node in nodes.items() if node.state in PLACED]

    def _rack_dies(self) -> None:
        names = self._in_use()
        if not names:
            return
        self.struck["rack lost power"] += 1
        first = self._world.random.randrange(len(names))
        for name in names[first : first + RACK_NODES]:
            self._world.kill_node(name, why="rack lost power")

    def _controller_cut(self) -> None:
        """Most nodes vanish from the controller's sight at once; training goes on."""
        world = self._world
        self.struck["controller's network cut"] += 1
        lasts_s = world.random.uniform(*CUT_S)
        chosen = tuple(name for name in self._in_use() if world.random.random() < 0.9)
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
