"""One attempt of a simulated job: what its workers know, and how far it is at any time.

Steps are not simulated one by one: progress is arithmetic on time.

What does not belong here: what happens to attempts (`training`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from controller.core.records import JobPlan
from outlast.ids import Attempt, JobId, NodeId
from outlast.layout import Layout
from outlast.skipped import StepRange, is_undone

if TYPE_CHECKING:
    from controller.sim.worker import Worker


@dataclass(slots=True, kw_only=True)
class SimJob:
    """A job as the user wrote it: what only the workers know of it."""

    job_id: JobId
    plan: JobPlan
    step_s: float
    restore_s: float
    commit_every: int
    upload_s: float
    # The user's own mistake strikes whenever this step is computed.
    error_step: int | None = None
    # The batch of this step gives no number, whoever computes it.
    nan_step: int | None = None
    # Host memory that each of its nodes takes; what is not in `plan.need` its start finds out.
    memory_bytes: int = 0
    # Whether another node holds a copy of what each node has in host memory.
    replicas: bool = False
    # Commit records in the store: step -> attempt that wrote it.
    commits: dict[int, Attempt] = field(default_factory=dict)
    store_up: bool = True
    # Furthest step that any attempt has completed, and what training took to get there if each
    # step counts once.
    high_step: int = 0
    trained_s: float = 0.0


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


@dataclass(slots=True, kw_only=True, eq=False)
class Training:
    """One attempt of a job."""

    job: SimJob
    attempt: Attempt
    rank_nodes: tuple[NodeId, ...]
    endpoint: tuple[str, int]
    committed_hint: int
    # What the attempt was told to leave out.
    skipped: tuple[StepRange, ...] = ()
    # What two replicas are to compute, and compare; 0 for nothing.
    replayed_step: int = 0
    joined: dict[int, Worker] = field(default_factory=dict)
    phase: Phase = Phase.GATHERING
    resumed: int = -1
    running_s: float = 0.0
    frozen: int = -1
    # Since when no step is completed any more.
    frozen_s: float = 0.0
    # For how long agents have learned that a rank may stand; 0 where they have not.
    stand_limit_s: float = 0.0
    culprit: int | None = None
    # A graceful stop was asked for: all ranks stop after the same step.
    stopping: bool = False
    # The nodes of its ranks, each once.
    nodes: tuple[NodeId, ...] = field(init=False)
    members: frozenset[NodeId] = field(init=False)
    _ranks: dict[NodeId, list[int]] = field(init=False)
    # The global batch stays, so with fewer ranks a step takes longer in proportion.
    step_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = tuple(dict.fromkeys(self.rank_nodes))
        self.members = frozenset(self.nodes)
        self._ranks = {node: [] for node in self.nodes}
        for rank, node in enumerate(self.rank_nodes):
            self._ranks[node].append(rank)
        self.step_s = self.job.step_s * self.job.plan.world_size / self.world_size

    def completed(self, now_s: float) -> int:
        """Last step that every rank has completed; -1 before the first."""
        if self.phase in (Phase.GATHERING, Phase.RESTORING):
            return -1
        if self.phase is not Phase.RUNNING:
            return self.frozen
        steps = int((now_s - self.running_s) / self.step_s + 1e-9)
        return min(self.job.plan.total_steps, self.resumed + steps)

    def seen_step(self, now_s: float) -> int:
        """The same as it seems: an attempt that computes what is worth nothing seems to go on."""
        if self.phase is not Phase.SPOILED:
            return self.completed(now_s)
        steps = int((now_s - self.running_s) / self.step_s + 1e-9)
        return min(self.job.plan.total_steps, self.resumed + steps)

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
        return self.running_s + (step - self.resumed) * self.step_s

    def first_trained_s(self, step: int) -> float:
        """What steps up to this one took it, as far as nobody had trained them before."""
        return max(0, step - self.job.high_step) * self.step_s

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
