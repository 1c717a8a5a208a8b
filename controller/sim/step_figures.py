"""When the figures of simulated steps are reported: around what may stand out in them.

Of a calm attempt a few steps are reported, of which no detector makes anything. Around anything
else all steps are that a detector remembers, before it and for a while after it.

What does not belong here: what the figures are (`figures`), and what they mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.agent.core.buffer import Weight
from controller.core.edge.detectors import CALM_S
from controller.sim.attempt import Training
from controller.sim.figures import KEPT_STEPS, steps_of
from controller.sim.worker import Worker
from diagnostics.core.curves import CALM_STEPS

if TYPE_CHECKING:
    from controller.sim.training import Trainings
    from controller.sim.world import World

# Reports of steps one after the other: enough for three windows of slow steps out of five, and
# for five of usual ones.
SPEED_REPORTS = 8


class StepFigures:
    """Of all attempts."""

    def __init__(self, world: World, trainings: Trainings) -> None:
        self._world = world
        self._trainings = trainings

    def lose_number(self, worker: Worker) -> None:
        """The loss that a rank computes is not a number, this time.

        As in `trainer.worker.loop`: it ends where that is to be acted on. Elsewhere the step's
        update is left out, and its report says so.
        """
        training = self._trainings.get(worker.job_id, worker.attempt)
        if training is None or training.job.modes["non_finite"] == "act":
            worker.end_without_number()
        elif training.is_training:
            done = training.completed(self._world.now_s)
            training.without_number.add(max(done, training.reported_step + 1))
            self.stand_out(training)

    def stand_out(self, training: Training) -> None:
        """A step whose figures are like those of no other; and the calm after it."""
        if not training.is_training:
            return
        self.report(training)
        calm_s = max(CALM_S, CALM_STEPS * training.step_s) + training.step_s
        self._world.timeline.after(calm_s, self.report, training)

    def follow(self, training: Training, times: int = SPEED_REPORTS) -> None:
        """Report all steps for a while: it takes many to see that they are slow, or no more."""
        if times and training.is_training:
            self.report(training)
            delay_s = KEPT_STEPS * training.step_s
            self._world.timeline.after(delay_s, self.follow, training, times - 1)

    def report(self, training: Training, *, most: int = KEPT_STEPS) -> None:
        """The agent of rank 0 reports the newest steps, as far as it has not."""
        agent = self._world.nodes[training.rank_nodes[0]].agent
        if not training.is_training or agent is None or training.job.is_silent:
            return
        event = steps_of(training, training.completed(self._world.now_s), most=most)
        if event is not None:
            agent.emit(event, Weight.STEPS)
