"""What simulated ranks report of completed steps: figures, and nothing of what they mean.

A healthy curve falls smoothly, with some noise. What stands out in it is what the training does:
a batch whose loss is far above the others, one that gives NaN, a node that makes all steps
slow. The production detectors find it, or do not.
"""

from __future__ import annotations

import math

from controller.sim.attempt import Training
from outlast.skipped import is_skipped
from outlast.v1 import agents_pb2, common_pb2

# As many as any detector remembers: of steps before them it would make nothing more.
KEPT_STEPS = 64
TOKENS = 1 << 20
# Multiples of what is usual.
SPIKE_LOSS = 4.0
SPIKE_NORM = 10.0
# Of the loss, from one step to the next.
_NOISE = 0.02


def report_of(training: Training, step: int) -> common_pb2.StepReport:
    """The figures of a completed step, by the clock of its node."""
    is_left_out = is_skipped(training.skipped, step)
    report = common_pb2.StepReport(
        step=step,
        attempt=training.attempt,
        loss=_loss(training, step),
        grad_norm=1.0 + 10.0 * _noise(step),
        learning_rate=1e-4,
        # None say that it was passed without its batch.
        tokens=0 if is_left_out else TOKENS,
        duration_s=training.step_s if step > training.paced_step else training.before_step_s,
        at_s=training.reached_s(step),
    )
    if is_left_out or _has_no_number(training, step):
        report.loss = report.grad_norm = math.nan
    elif step == training.job.spike_step:
        report.loss *= SPIKE_LOSS
        report.grad_norm *= SPIKE_NORM
    return report


def steps_of(
    training: Training, last: int, *, most: int = KEPT_STEPS
) -> agents_pb2.AgentEvent | None:
    """The newest steps up to `last` that were not reported yet, as many as count."""
    first = max(training.reported_step, last - most) + 1
    training.reported_step = max(training.reported_step, last)
    if first > last:
        return None
    reports = [report_of(training, step) for step in range(first, last + 1)]
    return agents_pb2.AgentEvent(
        job_id=training.job.job_id,
        attempt=training.attempt,
        step_reports=agents_pb2.StepReports(reports=reports),
    )


def _has_no_number(training: Training, step: int) -> bool:
    return step == training.job.nan_step or step in training.without_number


def _loss(training: Training, step: int) -> float:
    return (2.0 + 8.0 / (1.0 + step / 100.0)) * (1.0 + _noise(step))


def _noise(step: int) -> float:
    """The same for the same step, whichever attempt computes it."""
    return _NOISE * ((step * 2_654_435_761 % 1_000) / 1_000.0 - 0.5)
