"""The agent and its ranks at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from checkpoint.stage.guarding import GuardCounts
from outlast.blackbox import Expected, Phase, StepUse, TimeUse


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """What the black box of a running worker says."""

    job_id: str
    rank: int
    # Pipeline stage: ranks of different stages have different work to do.
    stage: int
    completed_step: int
    phase: Phase
    # Whether it is inside an operation with other ranks.
    is_in_operation: bool
    op_seq: int
    time_use: TimeUse
    step_use: StepUse
    expected: Expected | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReading:
    """Copies of host memory between this node and others."""

    # By way: sent, received, fetched.
    bytes: Mapping[str, int]
    # What became of copies that were brought here, and of looking for state at a start.
    outcomes: Mapping[str, int]
    fetches: Mapping[str, int]
    num_held: int
    lag_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The present values of an agent."""

    workers_running: int
    events_buffered: int
    events_dropped: int
    heartbeats: int
    sessions: int
    is_connected: bool
    standby_restarts: int
    # Of its observers, by the part that made them.
    mistakes: Mapping[str, int]
    # Workers that ended, by how; uploads, by what became of them.
    worker_exits: Mapping[str, int]
    uploads: Mapping[str, int]
    guarded: GuardCounts
    replicas: ReplicaReading
    ranks: tuple[RankReading, ...]
