"""What the workers of an attempt do together: gather, restore, train, break, finish.

Steps are not simulated one by one: progress is arithmetic on time, and only what
somebody could notice is an event. Host memory and the checkpoint store follow the
rules of `checkpoint`: a rank seals its newest two steps, a common one always
exists, and a checkpoint is there once its commit record is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from controller.core.records import JobPlan
from outlast.ids import Attempt, JobId, NodeId

if TYPE_CHECKING:
    from tests.sim.agent import Worker
    from tests.sim.world import World

# Ranks that wait for a missing one give up after so long.
RENDEZVOUS_TIMEOUT_S = 300.0


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
    # Commit records in the store: step -> attempt that wrote it.
    commits: dict[int, Attempt] = field(default_factory=dict)
    store_up: bool = True
    # Furthest step that any attempt has completed.
    high_step: int = 0


class Phase(Enum):
    """Where an attempt's workers are."""

    GATHERING = auto()
    RESTORING = auto()
    RUNNING = auto()
    HUNG = auto()
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
    joined: dict[int, Worker] = field(default_factory=dict)
    phase: Phase = Phase.GATHERING
    resumed: int = -1
    running_s: float = 0.0
    frozen: int = -1
    culprit: int | None = None
    # A graceful stop was asked for: all ranks stop after the same step.
    stopping: bool = False

    def completed(self, now_s: float) -> int:
        """Last step that every rank has completed; -1 before the first."""
        if self.phase in (Phase.GATHERING, Phase.RESTORING):
            return -1
        if self.phase is not Phase.RUNNING:
            return self.frozen
        steps = int((now_s - self.running_s) / self.job.step_s + 1e-9)
        return min(self.job.plan.total_steps, self.resumed + steps)

    def reaches_s(self, step: int) -> float:
        """When this step is completed if nothing happens."""
        return self.running_s + (step - self.resumed) * self.job.step_s

    @property
    def is_training(self) -> bool:
        return self.phase is Phase.RUNNING


class Trainings:
    """All attempts of all jobs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.by_attempt: dict[tuple[JobId, Attempt], Training] = {}

    def get(self, job: JobId, attempt: Attempt) -> Training | None:
        return self.by_attempt.get((job, attempt))

    def live(self) -> list[Training]:
        """Attempts that train just now."""
        return [training for training in self.by_attempt.values() if training.is_training]

    def joined(self, worker: Worker, training: Training) -> None:
        """A worker has started and waits for its peers."""
        world = self._world
        self.by_attempt[training.job.job_id, training.attempt] = training
        if not training.joined:
            world.timeline.after(RENDEZVOUS_TIMEOUT_S, self._gathering_ends, training)
        training.joined[worker.rank] = worker
        if training.phase is not Phase.GATHERING:
            # Its peers are gone already.
            self._cascade(training, worker, world.random.uniform(0.5, 5.0))
        elif len(training.joined) == training.job.plan.world_size:
            host = world.nodes[training.rank_nodes[0]]
            moved = host.agent is None or host.agent.port != training.endpoint[1]
            if moved or not all(peer.is_running for peer in training.joined.values()):
                # They wait for each other until they give up.
                return
            training.phase = Phase.RESTORING
            delay_s = training.job.restore_s * world.random.uniform(0.5, 2.0)
            world.timeline.after(delay_s, self._restored, training)

    def worker_gone(self, worker: Worker, *, silently: bool = False) -> None:
        """A rank has ended, so the others will; `silently` when its whole node went dark."""
        training = self.get(worker.job_id, worker.attempt)
        if training is None or training.phase in (Phase.BROKEN, Phase.DONE):
            return
        if training.phase is Phase.GATHERING and worker.rank != 0:
            return
        self.freeze(training, Phase.BROKEN)
        random = self._world.random
        for peer in training.joined.values():
            if peer.is_running:
                delay_s = random.uniform(5.0, 60.0) if silently else random.uniform(0.2, 4.0)
                self._cascade(training, peer, delay_s)

    def freeze(self, training: Training, phase: Phase) -> None:
        """No step is completed from here on; what was sealed stays sealed."""
        done = training.completed(self._world.now_s)
        was = training.phase
        training.frozen, training.phase = done, phase
        if was is Phase.RUNNING and done > training.resumed:
            training.job.high_step = max(training.job.high_step, done)
            self._seal(training, done)

    def hang(self, training: Training, culprit: int) -> None:
        if training.phase is Phase.RUNNING:
            self.freeze(training, Phase.HUNG)
            training.culprit = culprit

    def stop_gracefully(self, training: Training) -> None:
        """The flag rides on the next step: every rank stops after it, told or not."""
        if training.phase is not Phase.RUNNING or training.stopping:
            return
        training.stopping = True
        delay_s = training.job.step_s * self._world.random.uniform(0.1, 1.0)
        self._world.timeline.after(delay_s, self._stopped_gracefully, training)

    def cut_from_peers(self, node: NodeId) -> None:
        """A node lost the network between workers: its ranks and their peers fail."""
        for training in list(self.by_attempt.values()):
            if node in training.rank_nodes and training.phase in (
                Phase.RESTORING,
                Phase.RUNNING,
                Phase.HUNG,
            ):
                victim = next(w for w in training.joined.values() if w.node == node)
                self.worker_gone(victim, silently=True)

    # Restoring and running

    def _gathering_ends(self, training: Training) -> None:
        if training.phase is Phase.GATHERING:
            training.phase = Phase.BROKEN
            for worker in training.joined.values():
                self._cascade(training, worker, self._world.random.uniform(0.0, 5.0))

    def _cascade(self, training: Training, worker: Worker, delay_s: float) -> None:
        self._world.timeline.after(
            delay_s, worker.end, 1, "cascade", "", "connection closed by peer"
        )

    def _restored(self, training: Training) -> None:
        world = self._world
        if training.phase is not Phase.RESTORING:
            return
        training.resumed = self._agree(training)
        training.phase = Phase.RUNNING
        training.running_s = world.now_s
        world.checkers.resumed(training)
        world.trace("train", training.job.job_id, f"a{training.attempt} from {training.resumed}")
        self._schedule(training)

    def _agree(self, training: Training) -> int:
        """The step that all ranks restore: from host memory if that is new enough."""
        common: frozenset[int] | None = None
        for rank, node_id in enumerate(training.rank_nodes):
            sealed = self._world.nodes[node_id].memory.get(training.job.job_id, {}).get(rank, ())
            common = frozenset(sealed) if common is None else common & frozenset(sealed)
        in_memory = max(common or (), default=-1)
        if in_memory >= max(0, training.committed_hint):
            return in_memory
        return max(training.job.commits, default=0)

    def _schedule(self, training: Training) -> None:
        """Everything that can be noticed of an undisturbed attempt."""
        timeline, job = self._world.timeline, training.job
        notable = {training.resumed + 1, training.resumed + 2, job.high_step, job.high_step + 1}
        for step in sorted(notable):
            if training.resumed < step <= job.plan.total_steps:
                timeline.at(training.reaches_s(step) + 0.01, self._report, training)
        self._schedule_commit(training, training.resumed)
        timeline.at(training.reaches_s(job.plan.total_steps) + 0.02, self._finish, training)
        if job.error_step is not None and job.error_step > training.resumed:
            timeline.at(training.reaches_s(job.error_step) - 0.01, self._user_error, training)

    def _report(self, training: Training) -> None:
        if not training.is_training:
            return
        for node_id in dict.fromkeys(training.rank_nodes):
            agent = self._world.nodes[node_id].agent
            if agent is not None:
                agent.report_progress(training)

    def _finish(self, training: Training) -> None:
        if not training.is_training:
            return
        world = self._world
        self.freeze(training, Phase.DONE)
        self._report_done(training)
        for worker in training.joined.values():
            world.timeline.after(world.random.uniform(0.0, 2.0), worker.end, 0, "", "", "")

    def _report_done(self, training: Training) -> None:
        for node_id in dict.fromkeys(training.rank_nodes):
            agent = self._world.nodes[node_id].agent
            if agent is not None:
                agent.report_progress(training)

    def _user_error(self, training: Training) -> None:
        if training.is_training:
            rank = training.job.error_step or 0
            worker = training.joined[rank % training.job.plan.world_size]
            worker.end(1, "user_error", "f00d", "ValueError: bad sample")

    def _stopped_gracefully(self, training: Training) -> None:
        if training.phase is not Phase.RUNNING:
            return
        self.freeze(training, Phase.DONE)
        for worker in training.joined.values():
            self._world.timeline.after(
                self._world.random.uniform(0.0, 1.0), worker.end, 75, "clean", "", "stopped"
            )

    def _seal(self, training: Training, done: int) -> None:
        """Each rank has sealed the common step, and its neighbour on one side."""
        random, job = self._world.random, training.job
        for rank, node_id in enumerate(training.rank_nodes):
            memory = self._world.nodes[node_id].memory
            ahead = rank and done < job.plan.total_steps and random.random() < 0.3
            sealed = (done, done + 1) if ahead else (done - 1, done)
            memory.setdefault(job.job_id, {})[rank] = sealed

    # Checkpoints

    def _schedule_commit(self, training: Training, after_step: int) -> None:
        every = training.job.commit_every
        step = min((after_step // every + 1) * every, training.job.plan.total_steps)
        if step > after_step:
            self._world.timeline.at(
                training.reaches_s(step) + 0.005, self._commit_due, training, step
            )

    def _commit_due(self, training: Training, step: int) -> None:
        if not training.is_training:
            return
        self._report(training)
        world, job = self._world, training.job
        agents = [world.nodes[node].agent for node in dict.fromkeys(training.rank_nodes)]
        delay_s = job.upload_s * world.random.uniform(0.5, 2.0)
        world.timeline.after(delay_s, self._commit, training, step, agents)
        self._schedule_commit(training, step)

    def _commit(self, training: Training, step: int, agents: list[object]) -> None:
        world, job = self._world, training.job
        nodes = [world.nodes[node] for node in dict.fromkeys(training.rank_nodes)]
        present = [node.agent for node in nodes]
        coordinator = nodes[0].agent
        all_there = all(
            now is not None and now is then for now, then in zip(present, agents, strict=True)
        )
        if all_there and job.store_up:
            # Created only if absent: a zombie changes nothing that is committed.
            job.commits.setdefault(step, training.attempt)
            job.high_step = max(job.high_step, step)
            world.trace("commit", job.job_id, f"step {step} by a{training.attempt}")
            assert coordinator is not None
            coordinator.report_commit(job.job_id, step)
        elif coordinator is not None and coordinator is agents[0]:
            why = "No space left on device" if not job.store_up else "parts are missing"
            coordinator.report_trouble(job.job_id, step, why)
