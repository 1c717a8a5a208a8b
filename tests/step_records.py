"""Records of steps as a black box has them."""

from __future__ import annotations

from outlast.blackbox import StepRecord


def step_record(step: int, start_ns: int, end_ns: int) -> StepRecord:
    return StepRecord(
        step=step,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=8,
        start_ns=start_ns,
        end_ns=end_ns,
        eval_loss=None,
    )
