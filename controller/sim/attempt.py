"""One attempt of a simulated job: what its workers know, and how far it is at any time.

Steps are not simulated one by one: progress is arithmetic on time.

What does not belong here: what happens to attempts (`training`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, TypedDict

from checkpoint.core.placement import Placement, place_replicas
from checkpoint.replicas.placing import partner_node_indexes
from controller.core.edge.settings import NO_JOB
from controller.core.records import JobPlan
from controller.ranknodes import rank_nodes
from outlast.detectors import DetectorsSpec
from outlast.ids import Attempt, JobId, NodeId
from outlast.layout import Layout
from outlast.skipped import StepRange, is_undone
from outlast.v1 import agents_pb2

if TYPE_CHECKING:
    from controller.sim.worker import Worker


# As in a job's file where nothing is said of them.
DEFAULT_MODES: Mapping[str, str] = {name: str(mode) for name, mode in DetectorsSpec()}


@dataclass(slots=True, kw_only=True)
class SimJob:
    """A job as the user wrote it: what only the workers know of it."""

    job_id: JobId
    plan: JobPlan
    step_s: float
    restore_s: float
    commit_every: int
    upload_s: float
    # Of a script with `outlast.session`: how many steps it has, which nobody else knows.
    script_steps: int | None = None
    # It reports no steps, and saves by itself: the step that it has saved.
    is_silent: bool = False
    saved_step: int = 0
    # The user's own mistake strikes whenever this step is computed.
    error_step: int | None = None
    # Steps whose batch gives NaN, or a loss far above the others, on every replica.
    nan_step: int | None = None
    spike_step: int | None = None
    # What its detectors may do, by their names.
    modes: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_MODES))
    # Host memory that each of its nodes takes; what is not in `plan.need` its start finds out.
    memory_bytes: int = 0
    # Whether another node holds a copy of what each node has in host memory, as with
    # `checkpoint.replicas`; for how many steps a copy is on its way; and whether no two
    # data-parallel ranks hold the same, as with ZeRO.
    replicas: bool = False
    copy_steps: int = 1
    dp_is_sharded: bool = True
    # How much of the time somebody reads a slot of a rank's host memory.
    read_share: float = 0.0
    # How often agents of its nodes are to send a heartbeat.
    heartbeat_s: float = NO_JOB.heartbeat_period_s
    # Commit records in the store: step -> attempt that wrote it.
    commits: dict[int, Attempt] = field(default_factory=dict)
    store_up: bool = True
    # Furthest step that any attempt has completed, and what training took to get there if each
    # step counts once.
    high_step: int = 0
    trained_s: float = 0.0
    # Since when its newest attempt has trained.
    began_s: float = 0.0

    @property
    def last_step(self) -> int:
        """The step after which it is done."""
        steps = self.plan.total_steps if self.script_steps is None else self.script_steps
        assert steps is not None, "of a script it is said apart"
        return steps

    @property
    def most_ahead(self) -> int:
        """How many steps beyond that all ranks may find: of a rank that was ahead, as its twins."""
        return 1 if self.replicas and not self.dp_is_sharded else 0

    def keep_copies(self, *, dp_is_sharded: bool) -> None:
        """Host memory is copied to other nodes from the job's first start on."""
        self.replicas, self.dp_is_sharded = True, dp_is_sharded
        plan = self.plan
        self.plan = replace(
            plan,
            **_copies(self, plan, plan.nodes),
            sizes=tuple(replace(size, **_copies(self, plan, size.nodes)) for size in plan.sizes),
        )


def placement_of(
    job: SimJob, layout: Layout, rank_nodes: Sequence[str], shift: int = 0
) -> Placement | None:
    """Where else the state of each rank is; None where the job wants no copies."""
    if not job.replicas:
        return None
    return place_replicas(layout, rank_nodes, dp_is_sharded=job.dp_is_sharded, shift=shift)


class _Copies(TypedDict):
    replica_node_indexes: tuple[tuple[int, ...], ...]
    replica_shift: int


def _copies(job: SimJob, plan: JobPlan, nodes: int) -> _Copies:
    """As the controller has it from a spec."""
    per_node = plan.workers_per_node
    layout = Layout(tp=plan.tp, pp=plan.pp, dp=nodes * per_node // (plan.tp * plan.pp))
    names = [name for name in map(str, range(nodes)) for _ in range(per_node)]
    placement = placement_of(job, layout, names)
    assert placement is not None
    indexes = partner_node_indexes(placement, per_node)
    return {"replica_node_indexes": indexes, "replica_shift": placement.shift}


class Phase(Enum):
    """Where an attempt's workers are."""

    GATHERING = auto()
    RESTORING = auto()
    RUNNING = auto()
    HUNG = auto()
    # They go on, as far as anybody sees, and what they compute is worth nothing.
    SPOILED = auto()
    BROKEN = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Start:
    """What an order to start says to all nodes alike."""

    rank_nodes: tuple[NodeId, ...]
    endpoint: tuple[str, int]
    committed_step: int
    skipped: tuple[StepRange, ...]
    replayed_step: int
    replica_shift: int


def read_start(start: agents_pb2.StartWorkers) -> Start:
    """The part of an order to start that is the same on all nodes."""
    return Start(
        rank_nodes=tuple(map(NodeId, rank_nodes(start))),
        endpoint=(start.rendezvous_host, start.rendezvous_port),
        committed_step=start.committed_step,
        skipped=tuple(StepRange(first=each.first, last=each.last) for each in start.skipped),
        replayed_step=start.replayed_step,
        replica_shift=start.replica_shift,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Training:
    """One attempt of a job."""

    job: SimJob
    attempt: Attempt
    rank_nodes: tuple[NodeId, ...]
    endpoint: tuple[str, int]
    committed_hint: int
    # What the attempt was ordered to leave out.
    skipped: tuple[StepRange, ...] = ()
    # What two replicas are to compute, and compare; 0 for nothing.
    replayed_step: int = 0
    # By how many nodes copies are away; 0: as the layout has it.
    replica_shift: int = 0
    joined: dict[int, Worker] = field(default_factory=dict)
    # By node, the agents that may have its ranks' state, as its order to start says.
    peers: dict[NodeId, tuple[agents_pb2.ReplicaPeer, ...]] = field(default_factory=dict)
    phase: Phase = Phase.GATHERING
    resumed: int = -1
    # Since when steps take as long as they do now, and the last step before that; what a step took
    # until then.
    paced_s: float = 0.0
    paced_step: int = -1
    before_step_s: float = 0.0
    # How many times as long as usual a step takes.
    slowness: float = 1.0
    # How often it was planned what is noticed of it when.
    num_plans: int = 0
    # Up to where steps were reported, and those that gave NaN once.
    reported_step: int = -1
    without_number: set[int] = field(default_factory=set)
    frozen: int = -1
    # Since when no step is completed any more.
    frozen_s: float = 0.0
    # When heartbeats say that it goes on, which had stood.
    said_to_go_on_s: float = 0.0
    # For how long agents have learned that a rank may stand; 0 where they have not.
    stall_limit_s: float = 0.0
    culprit: int | None = None
    # Whether all ranks found the state that they resumed from in host memory.
    is_from_memory: bool = False
    # Whether what they seal is copied to other nodes.
    is_copied: bool = False
    # A graceful stop was asked for: all ranks stop after the same step.
    stopping: bool = False
    # Where else the state of its ranks is; None where its job wants no copies.
    placement: Placement | None = field(init=False)
    # The nodes of its ranks, each once.
    nodes: tuple[NodeId, ...] = field(init=False)
    members: frozenset[NodeId] = field(init=False)
    _ranks: dict[NodeId, list[int]] = field(init=False)
    # The global batch stays, so with fewer ranks a step takes longer in proportion.
    usual_step_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = tuple(dict.fromkeys(self.rank_nodes))
        self.members = frozenset(self.nodes)
        self._ranks = {node: [] for node in self.nodes}
        for rank, node in enumerate(self.rank_nodes):
            self._ranks[node].append(rank)
        self.placement = placement_of(self.job, self.layout, self.rank_nodes, self.replica_shift)
        self.usual_step_s = self.job.step_s * self.job.plan.world_size / self.world_size

    def completed(self, now_s: float) -> int:
        """Last step that every rank has completed; -1 before the first."""
        if self.phase in (Phase.GATHERING, Phase.RESTORING):
            return -1
        if self.phase is not Phase.RUNNING:
            return self.frozen
        return self._reached(now_s)

    def _reached(self, now_s: float) -> int:
        steps = int((now_s - self.paced_s) / self.step_s + 1e-9)
        return min(self.job.last_step, self.paced_step + steps)

    def seen_step(self, now_s: float) -> int:
        """The same as it seems: an attempt that computes what is worth nothing seems to go on."""
        if self.phase is not Phase.SPOILED:
            return self.completed(now_s)
        return self._reached(now_s)

    def ranks_on(self, node: NodeId) -> list[int]:
        """The ranks that a node has."""
        return self._ranks.get(node, [])

    @property
    def least_step(self) -> int:
        """What it must not resume before: storage has it, unless that is undone."""
        is_hint_undone = is_undone(self.skipped, self.committed_hint)
        return 0 if is_hint_undone else max(0, self.committed_hint)

    def reaches_s(self, step: int) -> float:
        """When this step is completed if nothing happens."""
        return self.paced_s + (step - self.paced_step) * self.step_s

    @property
    def step_s(self) -> float:
        """What a step takes now."""
        return self.slowness * self.usual_step_s

    def begin(self, resumed: int, slowness: float, now_s: float) -> None:
        """All ranks have the state after a step, and train from now on."""
        self.resumed = self.paced_step = self.reported_step = resumed
        self.paced_s, self.slowness, self.phase = now_s, slowness, Phase.RUNNING
        self.before_step_s = self.step_s
        self.job.began_s = now_s

    def set_pace(self, slowness: float, now_s: float) -> None:
        """From now on a step takes so many times as long as usual, the one under way as well."""
        done = self._reached(now_s)
        part = (now_s - self.reached_s(done)) / self.step_s
        self.before_step_s, self.slowness = self.step_s, slowness
        self.paced_step, self.paced_s = done, now_s - part * self.step_s

    def reached_s(self, step: int) -> float:
        """When a step was completed that is."""
        if step >= self.paced_step:
            return self.reaches_s(step)
        return self.paced_s - (self.paced_step - step) * self.before_step_s

    def first_trained_s(self, step: int) -> float:
        """What steps up to this one took it, as far as nobody had trained them before."""
        return max(0, step - self.job.high_step) * self.usual_step_s

    def note_trained(self, step: int) -> None:
        """All steps up to this one are complete."""
        self.job.trained_s += self.first_trained_s(step)
        self.job.high_step = max(self.job.high_step, step)

    @property
    def world_size(self) -> int:
        return len(self.rank_nodes)

    @property
    def layout(self) -> Layout:
        plan = self.job.plan
        return Layout(tp=plan.tp, pp=plan.pp, dp=self.world_size // (plan.tp * plan.pp))

    @property
    def is_training(self) -> bool:
        return self.phase is Phase.RUNNING

    def step_to_report(self, step: int) -> int:
        """What agents know of ranks that have completed a step."""
        return min(step, 0) if self.job.is_silent else step
