"""What a demo recorded, made small: a run with two faults and the incidents they led to."""

from __future__ import annotations

from typing import Any

from demo.analysis import FaultKind, Injected, Step

STEP_S = 0.5
START_S = 1_000.0


def curve(steps: int, *, attempt: int = 1, start_s: float = START_S) -> list[Step]:
    """A run in which every step takes STEP_S; step 1 ends STEP_S after `start_s`."""
    return [
        Step(
            step=step,
            attempt=attempt,
            loss=5.0 / step + 0.1,
            duration_s=STEP_S,
            at_s=start_s + step * STEP_S,
            eval_loss=4.0 if step % 4 == 0 else None,
        )
        for step in range(1, steps + 1)
    ]


WORKER_FAULT = Injected(
    kind=FaultKind.WORKER_KILLED, at_s=1_002.0, step=4, node="node-1", rank=3, pids=(4711,)
)
NODE_FAULT = Injected(
    kind=FaultKind.NODE_LOST, at_s=1_010.0, step=8, node="node-2", rank=None, pids=(1, 2, 3)
)


def incident(number: int, fault: Injected, **changes: Any) -> dict[str, Any]:
    """The incident that a fault led to: noticed after 0.25 s, recovered after 1.5 s."""
    opened_s = fault.at_s + 0.25
    facts: dict[str, Any] = {
        "incident_id": f"tiny-abcde.i{number}",
        "job_id": "tiny-abcde",
        "attempt": number,
        "state": "CLOSED",
        "cause": str(fault.kind),
        "action": "restart_in_place",
        "reason": f"because of {fault.node} <&>",
        "culprit_nodes": [fault.node],
        "evidence": [
            {
                "kind": "worker_exit",
                "node": "node-0",
                "rank": 0,
                "detail": "connection closed by peer",
                "at_s": fault.at_s + 0.2,
            },
            {
                "kind": "worker_exit",
                "node": fault.node,
                "rank": fault.rank,
                "detail": "killed by SIGKILL",
                "at_s": fault.at_s + 0.1,
            },
        ],
        "timeline": [
            {"phase": "fault", "at_s": fault.at_s + 0.1, "detail": "killed by SIGKILL"},
            {"phase": "detected", "at_s": opened_s, "detail": ""},
            {"phase": "suspending", "at_s": opened_s + 0.05, "detail": "stopping"},
            {"phase": "first_step", "at_s": fault.at_s + 1.6, "detail": "fork 0.010 s"},
            {"phase": "closed", "at_s": fault.at_s + 2.6, "detail": "past it"},
        ],
        "opened_s": opened_s,
        "closed_s": fault.at_s + 2.6,
        "fault_step": fault.step,
        "resumed_step": fault.step,
        "steps_redone": 0,
        # Both count from the evidence, 0.1 s after the injection.
        "detection_s": 0.15,
        "recovery_s": 1.4,
    }
    return facts | changes
