"""The part of a job's spec that says when it is its turn."""

from __future__ import annotations

from pydantic import Field

from outlast.section import Section


class QueueSpec(Section):
    """Which of several jobs get nodes first."""

    priority: int = Field(
        0,
        ge=-100,
        le=100,
        description="Jobs of a higher priority get free nodes first. -100 to 100.",
    )
    preempts: bool = Field(
        False,
        description="Have running jobs of a lower priority stop after a step when this one lacks "
        "nodes. They go on from that step when nodes are free for them.",
    )
