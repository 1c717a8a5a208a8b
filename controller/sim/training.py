"""What the workers of an attempt do together: gather, restore, train, break, finish.

Steps are not simulated one by one: progress is arithmetic on time, and only what
somebody could notice is an event. A checkpoint is in the store once its commit record is.

What does not belong here: what host memory holds (`memory`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from controller.sim import uploads
from controller.sim.attempt import Phase, Start, Training, read_start
from controller.sim.memory import Memory
from controller.sim.step_figures import StepFigures
from diagnostics.core.pace import KNOWN_PASSES, USUAL_FACTOR, USUAL_FLOOR_S, WARM_UP_STEPS
from outlast.failures import FailureClass
from outlast.ids import Attempt, JobId, NodeId
from outlast.skipped import is_skipped, is_undone
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerExitCode

if TYPE_CHECKING:
    from controller.sim.worker import Worker
    from controller.sim.world import World


class Trainings:
    """All attempts of all jobs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.by_attempt: dict[tuple[JobId, Attempt], Training] = {}
        self.figures = StepFigures(world, self)
        self._memory = Memory(world)
        # As long as any node has an order to start that is not done.
        self._starts: WeakValueDictionary[tuple[str, int], Start] = WeakValueDictionary()

    def start_of(self, command: agents_pb2.Command) -> Start:
        """What an order to start says to all nodes alike, read once for all of them."""
        key = (command.job_id, command.attempt)
        start = self._starts.get(key)
        if start is None:
            start = self._starts[key] = read_start(command.start_workers)
        return start

    def get(self, job: JobId, attempt: Attempt) -> Training | None:
        return self.by_attempt.get((job, attempt))

    def forget_ended(self, job: JobId) -> None:
        """Drop attempts that are over and that nobody asks about any more."""
        ended = [
            key
            for key, training in self.by_attempt.items()
            if key[0] == job and training.phase in (Phase.BROKEN, Phase.DONE)
        ]
        # The newest may still be asked how far it came.
        for key in ended[:-1]:
            del self.by_attempt[key]

    def live(self) -> list[Training]:
        """Attempts that train just now."""
        return [training for training in self.by_attempt.values() if training.is_training]

    def joined(self, worker: Worker, training: Training) -> None:
        """A worker has started and waits for its peers."""
        world = self._world
        self.by_attempt[training.job.job_id, training.attempt] = training
        if not training.joined:
            timeout_s = world.pace.rendezvous_timeout_s
            world.timeline.after(timeout_s, self._gathering_ends, training)
        training.joined[worker.rank] = worker
        if training.phase is not Phase.GATHERING:
            # Its peers are gone already.
            self._cascade(training, worker, world.random.uniform(0.5, 5.0))
        elif len(training.joined) == training.world_size:
            host = world.nodes[training.rank_nodes[0]]
            moved = host.agent is None or host.agent.port != training.endpoint[1]
            apart = not training.members.isdisjoint(world.isolated)
            if moved or apart or not all(peer.is_running for peer in training.joined.values()):
                # They wait for each other until they give up.
                return
            training.phase = Phase.RESTORING
            self._memory.fetch(training)
            common = self._memory.common(training)
            in_memory = common is not None and common[0] >= training.least_step
            delay_s = world.pace.restore_s(training.job.restore_s, from_memory=in_memory)
            world.timeline.after(delay_s, self._restored, training)

    def worker_gone(self, worker: Worker, *, silently: bool = False) -> None:
        """A rank has ended, so the others will; `silently` when its whole node went dark."""
        training = self.get(worker.job_id, worker.attempt)
        if training is None or training.phase in (Phase.BROKEN, Phase.DONE):
            return
        if training.phase is Phase.GATHERING and worker.rank != 0:
            return
        self.freeze(training, Phase.BROKEN)
        random, most = self._world.random, self._world.fidelity.max_cascade
        for peer in islice(training.joined.values(), most):
            if peer.is_running:
                delay_s = random.uniform(5.0, 60.0) if silently else random.uniform(0.2, 4.0)
                self._cascade(training, peer, delay_s)

    def freeze(self, training: Training, phase: Phase) -> None:
        """No step is completed from here on; what was sealed stays sealed."""
        done = training.completed(self._world.now_s)
        was = training.phase
        training.frozen, training.frozen_s, training.phase = done, self._world.now_s, phase
        if was is Phase.RUNNING and done > training.resumed:
            training.note_trained(done)
            self._memory.seal(training, done)
        if was is Phase.RUNNING:
            self._world.controller.heartbeats.stands(training)

    def hang(self, training: Training, culprit: int) -> None:
        """Its ranks stand; agents say so soon where they have learned what a step takes."""
        if training.phase is Phase.RUNNING:
            self.freeze(training, Phase.HUNG)
            training.culprit = culprit
            if training.job.is_silent:
                training.stall_limit_s = self._world.pace.hang_timeout_s
            elif training.frozen - training.resumed >= KNOWN_PASSES + WARM_UP_STEPS:
                training.stall_limit_s = max(USUAL_FLOOR_S, USUAL_FACTOR * training.step_s)
            if training.stall_limit_s:
                self._world.controller.heartbeats.hangs(training)
            self._world.trace("train", training.job.job_id, f"a{training.attempt} hangs")

    def go_on(self, training: Training) -> None:
        """What its ranks waited for has come."""
        if training.phase is not Phase.HUNG:
            return
        world = self._world
        training.phase = Phase.RUNNING
        training.paced_step, training.paced_s = training.frozen, world.now_s
        training.before_step_s = training.step_s
        world.trace("train", training.job.job_id, f"a{training.attempt} goes on")
        self._plan(training)
        delay_s = world.random.uniform(0.0, training.job.heartbeat_s)
        training.said_to_go_on_s = world.now_s + delay_s
        world.timeline.after(delay_s, world.controller.heartbeats.hear, training)

    def stop_gracefully(self, training: Training) -> None:
        """The flag rides on the next step: every rank stops after it, ordered or not."""
        if training.phase is not Phase.RUNNING or training.stopping:
            return
        training.stopping = True
        delay_s = training.step_s * self._world.random.uniform(0.1, 1.0)
        self._world.timeline.after(delay_s, self._stopped_gracefully, training)

    def cut_from_peers(self, node: NodeId) -> None:
        """A node lost the network between workers: its ranks and their peers fail."""
        for training in list(self.by_attempt.values()):
            if node in training.members and training.phase in (
                Phase.RESTORING,
                Phase.RUNNING,
                Phase.HUNG,
                Phase.SPOILED,
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
            delay_s,
            worker.end,
            WorkerExitCode.FAILED,
            FailureClass.CASCADE,
        )

    def _restored(self, training: Training) -> None:
        world = self._world
        if training.phase is not Phase.RESTORING:
            return
        slowness = max(world.nodes[node].slowness for node in training.nodes)
        training.begin(self._agree(training), slowness, world.now_s)
        self._memory.resumed(training)
        world.checkers.resumed(training)
        world.trace("train", training.job.job_id, f"a{training.attempt} from {training.resumed}")
        last = training.job.last_step
        waits_for_last = training.job.plan.last_checkpoint_s > 0
        if training.resumed >= last and waits_for_last and last not in training.job.commits:
            uploads.upload(self._world, training, last)
        self._plan(training)

    def plan_anew(self, training: Training) -> None:
        """What its batches bring has changed."""
        self._plan(training)

    def set_pace(self, node: NodeId) -> None:
        """How slow a node is has changed, and so may all that train with it."""
        now_s, nodes = self._world.now_s, self._world.nodes
        for training in self.live():
            slowness = max(nodes[each].slowness for each in training.nodes)
            if node in training.members and slowness != training.slowness:
                # How fast it was is known to the detectors.
                self.figures.report(training)
                training.set_pace(slowness, now_s)
                self._plan(training)
                self.figures.follow(training)

    def newest_everywhere(self, job: JobId) -> int:
        """The step that is the newest in the memory of every rank's node; -1 when they differ."""
        return self._memory.newest_everywhere(job)

    def _agree(self, training: Training) -> int:
        """The step that all ranks restore: from host memory if that is new enough."""
        common = self._memory.common(training)
        if common is not None and common[0] >= training.least_step:
            training.is_from_memory = True
            return common[0]
        commits = training.job.commits
        if training.job.is_silent:
            return training.job.saved_step
        return max((step for step in commits if not is_undone(training.skipped, step)), default=0)

    def _plan(self, training: Training) -> None:
        """Everything that can be noticed of an undisturbed attempt, from now on."""
        training.num_plans += 1
        job, done = training.job, training.completed(self._world.now_s)
        first = training.resumed + 1
        for step in sorted({first, first + 1, job.high_step, job.high_step + 1}):
            if done < step <= job.last_step:
                self._at(training, step, 0.01, self._begins if step == first else self._goes_on)
        self._plan_commit(training, done)
        self._at(training, job.last_step, 0.02, self._finish)
        if job.error_step is not None and job.error_step > done:
            self._at(training, job.error_step, -0.01, self._user_error)
        self._plan_batch(training, training.replayed_step, done, -0.02, self._compare)
        is_fatal = job.modes["non_finite"] == "act"
        if is_fatal:
            self._plan_batch(training, job.nan_step, done, -0.01, self._no_number)
        else:
            self._plan_batch(training, job.nan_step, done, 0.01, self.figures.stand_out)
        self._plan_batch(training, job.spike_step, done, 0.01, self.figures.stand_out)

    def _plan_batch(
        self,
        training: Training,
        step: int | None,
        done: int,
        after_s: float,
        action: Callable[[Training], None],
    ) -> None:
        """When the batch of a step is computed, if it is neither done nor left out."""
        if step is not None and step > done and not is_skipped(training.skipped, step):
            self._at(training, step, after_s, action)

    def _at(
        self, training: Training, step: int, after_s: float, action: Callable[[Training], None]
    ) -> None:
        # By its key: the last step of most attempts never comes, and what waits for it must not
        # keep the attempt with all its workers.
        key = (training.job.job_id, training.attempt)
        at_s = training.reaches_s(step) + after_s
        self._world.timeline.at(at_s, self._due, key, training.num_plans, action)

    def _due(
        self, key: tuple[JobId, Attempt], plan: int, action: Callable[[Training], None]
    ) -> None:
        """Unless the attempt is over, or has become faster or slower, and another plan holds."""
        training = self.by_attempt.get(key)
        if training is not None and plan == training.num_plans:
            action(training)

    def _begins(self, training: Training) -> None:
        """Agents report that the first step is completed."""
        if training.is_training and self._world.fidelity.progress_at_once:
            self._world.controller.take_all_progress(training)
        self._goes_on(training)

    def _goes_on(self, training: Training) -> None:
        """Agents look at their ranks, as they do all the time, and heartbeats say what they see."""
        if not training.is_training:
            return
        self._world.controller.heartbeats.goes_on(training)
        if not self._world.fidelity.progress_at_once:
            self._report_from_all(training)
            self.figures.report(training, most=2)

    def _finish(self, training: Training) -> None:
        if not training.is_training:
            return
        world = self._world
        self.freeze(training, Phase.DONE)
        for worker in training.joined.values():
            world.timeline.after(
                world.random.uniform(0.0, 2.0), worker.end, WorkerExitCode.DONE, FailureClass.CLEAN
            )

    def _report_from_all(self, training: Training) -> None:
        for node_id in training.nodes:
            agent = self._world.nodes[node_id].agent
            if agent is not None:
                agent.report_progress(training)

    def _user_error(self, training: Training) -> None:
        if training.is_training:
            rank = training.job.error_step or 0
            worker = training.joined[rank % training.world_size]
            if training.job.is_silent:
                # As long as it has run before, it is tried until the budget is spent, and paused.
                training.job.error_step = None
            worker.end(WorkerExitCode.FAILED, FailureClass.PROGRAM_ERROR)

    def _no_number(self, training: Training) -> None:
        if training.is_training:
            rank = (training.job.nan_step or 0) % training.world_size
            training.joined[rank].end_without_number()

    def _compare(self, training: Training) -> None:
        """Replicas compare their bits: those of a corrupt node are wrong."""
        world, layout = self._world, training.layout
        if not training.is_training or layout.dp == 1:
            return
        for rank, worker in sorted(training.joined.items()):
            if world.nodes[worker.node].is_corrupt:
                replica = layout.coordinate(rank).dp
                for other, node in enumerate(training.rank_nodes):
                    if layout.coordinate(other).dp == replica:
                        world.checkers.suspect(node, "wrong bits in its replica")
                worker.end_with_other_bits()
                return

    def _stopped_gracefully(self, training: Training) -> None:
        if training.phase is not Phase.RUNNING:
            return
        self.freeze(training, Phase.DONE)
        if training.frozen > training.resumed and not training.job.is_silent:
            uploads.upload(self._world, training, training.frozen)
        for worker in training.joined.values():
            self._world.timeline.after(self._world.random.uniform(0.0, 1.0), worker.stop_after_step)

    # Checkpoints

    def _plan_commit(self, training: Training, after_step: int) -> None:
        every = training.job.commit_every
        step = min((after_step // every + 1) * every, training.job.last_step)
        if step > after_step:
            self._at(training, step, 0.005, partial(self._commit_due, step))

    def _commit_due(self, step: int, training: Training) -> None:
        if not training.is_training:
            return
        if is_undone(training.skipped, step):
            self._plan_commit(training, step)
            return
        if not self._world.fidelity.progress_at_once:
            self._report_from_all(training)
        uploads.upload(self._world, training, step)
        self._plan_commit(training, step)
