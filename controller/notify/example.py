"""The message that `outlast notify` sends."""

from __future__ import annotations

from controller.core.notices import Notice, NoticeKind
from controller.core.telling import Message
from outlast.ids import JobId

_JOB = JobId("test-message")


def example(now_s: float) -> Message:
    """A fault, marked as a test."""
    fault = Notice(
        key=f"test/{now_s:.3f}",
        kind=NoticeKind.INCIDENT,
        job=_JOB,
        at_s=now_s,
        incident=f"{_JOB}-1",
        cause="node_lost",
        action="replace_nodes",
        reason="a test of notifications; no job is affected",
        nodes=("node-0",),
        step=41,
    )
    return Message(job=_JOB, notices=(fault,))
