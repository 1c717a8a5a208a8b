"""The message that `outlast notify` sends."""

from __future__ import annotations

from controller.core.notifications.grouping import Message
from controller.core.notifications.job_events import EventKind, JobEvent
from outlast.ids import JobId

_JOB = JobId("test-message")


def example(now_s: float) -> Message:
    """A fault, marked as a test."""
    fault = JobEvent(
        key=f"test/{now_s:.3f}",
        kind=EventKind.INCIDENT,
        job=_JOB,
        at_s=now_s,
        incident=f"{_JOB}-1",
        cause="node_lost",
        action="replace_nodes",
        reason="a test of notifications; no job is affected",
        nodes=("node-0",),
        step=41,
    )
    return Message(job=_JOB, events=(fault,))
