"""What the figures of steps say: spikes, NaN and Inf, and slow decline.

What does not belong here: where the figures come from, and what to do about it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from diagnostics.core.windows import Lasting, robust_z

# Steps that say what is usual, and how many of them there must be.
HISTORY = 64
ENOUGH_HISTORY = 32
# Far outside of the spread *and* a multiple of the median.
SPIKE_Z = 8.0
LOSS_RATIO = 1.3
GRAD_NORM_RATIO = 4.0
# Gradient norms have heavy tails: in a healthy hour some came to 4.2 times their median, which was
# 17 deviations, but 7 of their logarithm.
GRAD_NORM_LOG_Z = 10.0
# So many steps without one, and the spike is over.
CALM_STEPS = 32

# A window of speed: long enough that an evaluation or an upload does not decide it.
SPEED_WINDOW_S = 60.0
SPEED_WINDOW_STEPS = 20
SLOWER = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The figures of one completed step."""

    step: int
    loss: float
    grad_norm: float
    duration_s: float


class SpikeWatch:
    """Loss and gradient norm against those of the steps before. A spike is left out of them."""

    def __init__(self) -> None:
        # Whether it was the loss that stood out in the newest step.
        self.is_of_loss = False
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._norms: deque[float] = deque(maxlen=HISTORY)

    def take(self, step: Step) -> str:
        """What stands out in this step, in words; "" when nothing does."""
        self.is_of_loss = False
        if not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)):
            return ""
        of_loss, of_norm = self._loss_spike(step.loss), self._norm_spike(step.grad_norm)
        self.is_of_loss = bool(of_loss)
        message = "; ".join(filter(None, (of_loss, of_norm)))
        return f"step {step.step}: {message}" if message else ""

    def _loss_spike(self, loss: float) -> str:
        before = self._losses
        if _is_multiple(loss, before, LOSS_RATIO) and robust_z(loss, before) > SPIKE_Z:
            return _in_words("loss", loss, before, f"{LOSS_RATIO:g}, and {SPIKE_Z:g} deviations")
        before.append(loss)
        return ""

    def _norm_spike(self, norm: float) -> str:
        before = self._norms
        if _is_multiple(norm, before, GRAD_NORM_RATIO) and _log_z(norm, before) > GRAD_NORM_LOG_Z:
            limit = f"{GRAD_NORM_RATIO:g}, and {GRAD_NORM_LOG_Z:g} deviations of the logarithm"
            return _in_words("gradient norm", norm, before, limit)
        before.append(norm)
        return ""


def _is_multiple(value: float, before: Sequence[float], ratio: float) -> bool:
    return len(before) >= ENOUGH_HISTORY and value > ratio * median(before)


def _log_z(value: float, before: Sequence[float]) -> float:
    # A norm of nothing is possible: all gradients are zero.
    logs = [math.log(each) for each in before if each > 0.0]
    return robust_z(math.log(value), logs) if logs else math.inf


def _in_words(name: str, value: float, before: Sequence[float], limit: str) -> str:
    usual = median(before)
    share = f"{value / usual:.1f} times" if usual else "above"
    return (
        f"{name} {value:.4g}, {share} the median {usual:.4g} of the last {len(before)} steps "
        f"(limit {limit})"
    )


def not_a_number(step: Step) -> str:
    """What of this step is NaN or Inf, in words; "" when all is."""
    figures = (("loss", step.loss), ("gradient norm", step.grad_norm))
    bad = [f"{name} {value}" for name, value in figures if not math.isfinite(value)]
    return f"step {step.step}: {', '.join(bad)}; the step's update was left out" if bad else ""


class SpeedWatch:
    """Median time of a step, window by window, against the best window so far.

    `best_s` is that of earlier attempts, so that a restart on slower nodes is not a new measure.
    """

    def __init__(self, best_s: float | None = None) -> None:
        self._window: list[float] = []
        self.best_s = best_s
        self._lasting = Lasting()
        self.message = ""

    def take(self, step: Step) -> bool | None:
        """True when steps have become slow for good, False when that is over, else None."""
        self._window.append(step.duration_s)
        if sum(self._window) < SPEED_WINDOW_S or len(self._window) < SPEED_WINDOW_STEPS:
            return None
        present_s = median(self._window)
        self._window = []
        best_s = self.best_s = min(present_s, self.best_s or present_s)
        self.message = (
            f"a step takes {present_s:.4g} s, {present_s / best_s:.2f} times the {best_s:.4g} s of "
            f"the job's best window (limit {SLOWER:g}, in 3 of 5 windows)"
        )
        return self._lasting.take(bad=present_s > SLOWER * best_s)
