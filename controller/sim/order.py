"""A command under way on a simulated node."""

from __future__ import annotations

from dataclasses import dataclass

from controller.agent.core.ledger import CommandKind
from controller.core.attempt_record import AttemptRecord
from controller.core.records import (
    CommandRecord,
    ForgetJob,
    PushCheckpoint,
    RunSuite,
    StartWorkers,
    StopWorkers,
)
from outlast.ids import JobId

KINDS = {
    StartWorkers: CommandKind.START,
    StopWorkers: CommandKind.STOP,
    RunSuite: CommandKind.SUITE,
    ForgetJob: CommandKind.FORGET,
    PushCheckpoint: CommandKind.PUSH,
}


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """A command under way."""

    record: CommandRecord
    # What an order to start has in common with those of the other nodes.
    attempt: AttemptRecord | None
    # When nothing is left of the workers that it stops; None while nobody was signalled.
    settled_s: float | None = None
    verdict: str = ""
    is_cancelled: bool = False

    @property
    def job(self) -> JobId:
        return self.record.job or JobId("")
