"""A large job over weeks: `outlast simulate` without its command line.

One job, one published mix, sourced durations; the production machine decides. Safety phase:
faults strike, every checker on. Liveness phase: faults stop, broken nodes are put right, and
the job must train again and end cleanly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from controller.core import accounting, cost
from controller.core import events as ev
from controller.core.accounting import Part
from controller.core.edge.liveness import Limits
from controller.core.kinds import Action
from controller.core.records import JobPlan, JobRecord, Size
from controller.core.standbys import standbys_for
from controller.core.states import TERMINAL, JobState
from controller.sim.attempt import SimJob
from controller.sim.campaign import DAY_S, RACK_NODES, Campaign
from controller.sim.durations import Duration, SourcedPace, durations_for, with_changes
from controller.sim.faults import end_faults
from controller.sim.garbage import few_collections
from controller.sim.incident_classes import IncidentClass, by_cause, opened_by, waited_for_node
from controller.sim.mixes import MIXES, Mix
from controller.sim.pace import WHOLE, Fidelity
from controller.sim.timeline import EPOCH_S
from controller.sim.violation import Violation
from controller.sim.world import Shape, World, make_size
from outlast.ids import JobId
from outlast.recovery import ElasticSpec

JOB = JobId("job")
_TAKE_NODES = (Action.REPLACE_NODES, Action.SWAP_NODES)
# Faults have stopped; within this the job must train, and then end.
RECOVER_S = 6 * 3600.0
SETTLE_S = 3 * 3600.0
# Messages up to this many nodes are simulated one by one.
WHOLE_UP_TO_NODES = 64
# With `recovery.elastic` sizes are those that the global batch can be divided by, which depends
# on the job; these are ours. Shares of the nodes.
ELASTIC_SIZES = (1.0, 7 / 8, 3 / 4, 1 / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What to simulate."""

    nodes: int = 1536
    gpus_per_node: int = 8
    days: float = 54.0
    mix: str = "llama3"
    seed: int = 0
    # Times the mix's own rate.
    rate: float = 1.0
    step_s: float = 6.0
    # Between checkpoints in storage.
    interval_s: float = 600.0
    # None: as many as the failure rate asks for.
    standbys: int | None = None
    replicas: bool = True
    # Whether the job goes on smaller while nodes are missing, by the spec's own defaults.
    elastic: bool = False
    heartbeat_s: float = 2.0
    # Racks that lose power, cuts of the controller's own network, and its deaths: so many each.
    mass: int = 1
    # Strike only with these of the planned faults; None: with all.
    only: tuple[int, ...] | None = None
    # NCCL starts as with so many GPUs; None: as with those that there are.
    scale_gpus: int | None = None
    # Means in seconds, by name, instead of the published ones.
    durations: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mix not in MIXES:
            raise ValueError(f"no mix is called {self.mix!r}; there are {', '.join(MIXES)}")
        bounds = {
            "nodes": (self.nodes, 1, 100_000),
            "gpus_per_node": (self.gpus_per_node, 1, 64),
            "days": (self.days, 0.01, 3_650.0),
            "rate": (self.rate, 0.001, 1_000.0),
            "step_s": (self.step_s, 0.01, 3_600.0),
            "interval_s": (self.interval_s, self.step_s, 1e7),
            "heartbeat_s": (self.heartbeat_s, 0.1, 600.0),
            "mass": (self.mass, 0, 1_000),
            "standbys": (self.num_standbys, 0, self.nodes),
        }
        for name, (value, least, most) in bounds.items():
            if not least <= value <= most:
                raise ValueError(f"{name}={value:g} is not between {least:g} and {most:g}")
        self.all_durations()

    @property
    def num_gpus(self) -> int:
        return self.scale_gpus or self.nodes * self.gpus_per_node

    @property
    def num_standbys(self) -> int:
        if self.standbys is not None:
            return self.standbys
        return standbys_for(self.nodes, self.node_faults_per_day)

    @property
    def scaled_mix(self) -> Mix:
        """The mix at the rate asked for."""
        mix = MIXES[self.mix]
        return replace(mix, per_1000_node_days=mix.per_1000_node_days * self.rate)

    @property
    def node_faults_per_day(self) -> float:
        """Of one node."""
        return self.scaled_mix.per_1000_node_days / 1000.0

    @property
    def stall_s(self) -> float:
        """What a step waits for its checkpoint."""
        return self.all_durations()["checkpoint_stall"].expected_s

    def all_durations(self) -> dict[str, Duration]:
        """The durations of this scale, with the changes asked for."""
        return with_changes(durations_for(self.num_gpus), self.durations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of a scenario. `parts_s` sums to `wall_s`.

    As in the controller's account, a job that trains at a smaller size is productive. `full_ettr`
    counts each step with the time that it takes at full size: what to compare sizes by.
    """

    scenario: Scenario
    wall_s: float
    parts_s: dict[str, float]
    ettr: float
    full_ettr: float
    steps: int
    steps_lost: int
    incidents: int
    classes: tuple[IncidentClass, ...]
    by_person: int
    struck: dict[str, int]
    num_idle: int
    num_planned: int
    replaced: int
    waited_for_node: int
    nodes_brought: int
    violations: tuple[str, ...]
    # Sliding hour and cumulative ETTR, sampled over the run: (days, cumulative, last hour).
    curve: tuple[tuple[float, float, float], ...]


def simulate(
    scenario: Scenario, *, trace: bool = False, report: Callable[[float, str], None] | None = None
) -> Result:
    """Run a scenario. A broken invariant ends the run and is part of the result.

    `report` gets now and then how many days have passed, and how it stands, in words.
    """
    violations: list[str] = []
    with few_collections():
        run = _Run(scenario, trace=trace, report=report)
        try:
            run.safety()
            run.liveness()
        except Violation as violation:
            violations.append(str(violation))
        return run.result(tuple(violations))


class _Run:
    """One scenario under way."""

    def __init__(
        self, scenario: Scenario, *, trace: bool, report: Callable[[float, str], None] | None
    ) -> None:
        self._scenario = scenario
        self._report = report
        pace = SourcedPace(scenario.seed, scenario.all_durations())
        self._world = world = World(scenario.seed, shape_of(scenario), pace=pace, trace=trace)
        self._campaign = Campaign(
            world, scenario.scaled_mix, pace, job=JOB, days=scenario.days, seed=scenario.seed
        )
        self._curve: list[tuple[float, float, float]] = []
        self._record: JobRecord | None = None
        self._steps = 0
        # What training them took, with its waits for checkpoints.
        self._trained_s = 0.0
        self._sampled_s = EPOCH_S

    def safety(self) -> None:
        """Faults strike."""
        world = self._world
        world.timeline.run_until(EPOCH_S + 60.0)
        world.submit(world.jobs[JOB])
        self._campaign.plan(mass=self._scenario.mass, only=self._scenario.only)
        end_s = self._campaign.end_s
        every_s = max(3600.0, (end_s - EPOCH_S) / 400)
        while world.now_s < end_s:
            world.timeline.run_until(min(end_s, world.now_s + every_s))
            self._sample()

    def liveness(self) -> None:
        """Faults are over: the job must train again, and end when it is stopped."""
        world = self._world
        end_faults(world)
        deadline_s = world.now_s + RECOVER_S
        while not self._state_is(JobState.RUNNING, *TERMINAL) and world.now_s < deadline_s:
            world.timeline.run_until(world.now_s + 60.0)
        if not self._state_is(JobState.RUNNING):
            raise Violation(f"invariant 10: the job does not train {RECOVER_S / 3600:g} h later")
        world.ask(ev.JobCancelRequested(job_id=JOB))
        world.timeline.run_until(world.now_s + SETTLE_S)
        assert world.controller.machine is not None
        world.checkers.finished(world.controller.machine.state)

    def _sample(self) -> None:
        """Note how far the job is, as it is true in the world."""
        world, machine = self._world, self._world.controller.machine
        record = None if machine is None else machine.state.jobs.get(JOB)
        if record is None:
            return
        self._record, self._sampled_s = record, world.now_s
        job = world.jobs[JOB]
        live = [(each, each.completed(world.now_s)) for each in world.trainings.live()]
        self._steps = max((step for _, step in live), default=0)
        self._steps = max(self._steps, job.high_step)
        ahead_s = max((each.first_trained_s(step) for each, step in live), default=0.0)
        self._trained_s = job.trained_s + ahead_s
        wall_s = world.now_s - record.submitted_s
        hour = accounting.ettr(accounting.window(record.account, world.now_s)) or 0.0
        days = (world.now_s - EPOCH_S) / DAY_S
        ratio = self._productive_s() / max(wall_s, 1.0)
        self._curve.append((days, ratio, hour))
        if self._report is not None:
            self._report(days, f"days; ETTR {100 * ratio:.2f} %, {record.num_incidents} incidents")

    def _productive_s(self) -> float:
        """Each step counted once, without what it waits for checkpoints."""
        return self._trained_s * self._training_share

    @property
    def _training_share(self) -> float:
        """Of the length of a step."""
        return self._scenario.step_s / (self._scenario.step_s + self._scenario.stall_s)

    def _state_is(self, *states: JobState) -> bool:
        machine = self._world.controller.machine
        return machine is not None and machine.state.jobs[JOB].state in states

    def result(self, violations: tuple[str, ...]) -> Result:
        """What came of it, as it stood when the faults ended."""
        machine, record = self._world.controller.machine, self._record
        if record is None:
            raise ValueError(f"the run ended before its job began: {'; '.join(violations)}")
        end_s = self._campaign.end_s
        incidents = [] if machine is None else opened_by(machine.state.incidents, end_s)
        wall_s = max(1.0, self._sampled_s - record.submitted_s)
        parts = self._parts(record, wall_s)
        replaced = [item for item in incidents if item.action in _TAKE_NODES]
        return Result(
            scenario=self._scenario,
            wall_s=wall_s,
            parts_s={str(part): seconds for part, seconds in parts.items()},
            ettr=parts[Part.PRODUCTIVE] / wall_s,
            full_ettr=self._steps * self._scenario.step_s / wall_s,
            steps=self._steps,
            steps_lost=sum(cost.steps_lost(item) or 0 for item in incidents),
            incidents=len(incidents),
            classes=by_cause(incidents),
            by_person=self._world.tracer.seen.get("job PAUSED", 0)
            + self._world.tracer.seen.get("job FAILED", 0),
            struck=dict(self._campaign.struck),
            num_idle=self._campaign.num_idle,
            num_planned=self._campaign.num_planned,
            replaced=len(replaced),
            waited_for_node=sum(waited_for_node(item) for item in replaced),
            nodes_brought=self._world.cluster.num_brought,
            violations=violations,
            curve=tuple(self._curve),
        )

    def _parts(self, record: JobRecord, wall_s: float) -> dict[Part, float]:
        """The job's account, with what only the world knows: which steps were completed.

        The controller believes in the seconds between a fault and its first sign, and in the
        step under way; they are detection here.
        """
        parts = accounting.totals(record.account, self._sampled_s)
        parts[Part.PRODUCTIVE] = self._productive_s()
        parts[Part.CHECKPOINT] = self._trained_s - self._productive_s()
        rest_s = wall_s - sum(parts.values())
        # An attempt's first step counts as restoring until it is reported.
        part = Part.DETECT if rest_s > 0 else Part.RESTORE
        parts[part] += rest_s
        return parts


def shape_of(scenario: Scenario) -> Shape:
    """The world of a scenario: its fleet, and its one job."""
    step_s = scenario.step_s + scenario.stall_s
    plan = JobPlan(
        nodes=scenario.nodes,
        # A node's ranks live and die together here, so one stands for all of them.
        workers_per_node=1,
        standby=scenario.num_standbys,
        total_steps=10**9,
        retry_budget=10,
        in_place_restarts=1,
        first_step_timeout_s=1800.0,
        stop_timeout_s=60.0,
        preflight_timeout_s=300.0,
        diagnose_timeout_s=600.0,
        sizes=_sizes(scenario.nodes) if scenario.elastic else (),
        shrink_after_s=ElasticSpec().after_s,
        grow_after_s=ElasticSpec().grow_after_s,
    )
    job = SimJob(
        job_id=JOB,
        plan=plan,
        step_s=step_s,
        restore_s=1.0,
        upload_s=1.0,
        commit_every=max(1, round(scenario.interval_s / step_s)),
        heartbeat_s=scenario.heartbeat_s,
    )
    if scenario.replicas:
        job.keep_copies(dp_is_sharded=True)
    return Shape(
        num_nodes=scenario.nodes + scenario.num_standbys,
        workers_per_node=1,
        jobs=(job,),
        provisions=True,
        keeps_pool=True,
        rack_nodes=RACK_NODES,
        fidelity=_fidelity(scenario.nodes),
        heartbeat_s=scenario.heartbeat_s,
        limits=_limits(scenario.heartbeat_s),
    )


def _fidelity(nodes: int) -> Fidelity:
    if nodes <= WHOLE_UP_TO_NODES:
        return WHOLE
    every = max(1, nodes // 16)
    return Fidelity(
        progress_at_once=True,
        max_cascade=8,
        idle_messages=False,
        max_results=32,
        codec_every=every,
        # Each looks at the whole fleet: a few times while all nodes answer an order once.
        compare_every=4 * every,
    )


def _limits(beat_s: float) -> Limits:
    # The defaults are 3, 7.5 and 30 times the default period.
    return Limits(late_s=3.0 * beat_s, lost_s=7.5 * beat_s, silent_s=30.0 * beat_s)


def _sizes(nodes: int) -> tuple[Size, ...]:
    numbers = sorted({max(1, int(nodes * share)) for share in ELASTIC_SIZES}, reverse=True)
    return tuple(map(make_size, numbers))
