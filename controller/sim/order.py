"""A command under way on a simulated node."""

from __future__ import annotations

from dataclasses import dataclass

from controller.agent.core.inputs import Command
from controller.agent.core.ledger import CommandKind
from controller.sim.attempt import Start
from outlast.ids import Attempt, JobId
from outlast.v1 import agents_pb2, diagnostics_pb2


@dataclass(slots=True, kw_only=True, eq=False)
class Order:
    """A command under way."""

    command: Command
    message: agents_pb2.Command
    # Of an order to start: what all nodes' workers are given alike.
    start: Start | None = None
    # When nothing is left of the workers that it stops; None while nobody was signalled.
    settled_s: float | None = None
    findings: tuple[diagnostics_pb2.Finding, ...] = ()
    is_cancelled: bool = False

    @property
    def job(self) -> JobId:
        return JobId(self.command.job_id)

    @property
    def attempt(self) -> Attempt:
        return Attempt(self.command.attempt)

    @property
    def is_stop(self) -> bool:
        return self.command.kind is CommandKind.STOP
