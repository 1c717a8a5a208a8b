"""One agent's machine: its commands, workers and reports, and its line to the controller.

`handle` takes what has happened and the time and returns what is to be done, in
order; `wake_at` is its only timer. A machine that is given the ledger of an
earlier agent on the same node continues the commands in it.
"""

from __future__ import annotations

import math
from typing import Generic

from controller.agent.core.actions import Action, GiveUpWorkers, SendEvents
from controller.agent.core.buffer import EventBuffer, Payload
from controller.agent.core.commands import CommandLimits, CommandMachine
from controller.agent.core.inputs import (
    AbsenceLimitSet,
    DataLoaderEnded,
    DataLoaderStarted,
    EventsAcknowledged,
    Input,
    SessionLost,
    TimePassed,
    Welcomed,
)
from controller.agent.core.ledger import CommandLedger
from controller.agent.core.line import Line
from controller.agent.core.reports import Reports
from controller.agent.core.workers import WorkerKey


class AgentMachine(Generic[Payload]):
    """Decides what an agent does; does nothing."""

    def __init__(
        self,
        ledger: CommandLedger,
        buffer: EventBuffer[Payload],
        *,
        now_s: float,
        limits: CommandLimits | None = None,
    ) -> None:
        self.commands = CommandMachine(ledger, limits)
        # Without a controller from the beginning.
        self.line = Line(buffer, now_s=now_s)
        self.reports = Reports()

    def handle(self, given: Input, now_s: float) -> list[Action]:
        """Take in what has happened; what is to be done about it, in this order."""
        match given:
            case Welcomed():
                self.line.welcomed()
                self.reports.welcomed()
                return [SendEvents()]
            case AbsenceLimitSet(limit_s=limit_s):
                self.line.absence_limit_s = limit_s
            case SessionLost():
                self.line.lost(now_s)
            case EventsAcknowledged(seq=seq):
                self.line.acknowledged(seq)
            case TimePassed():
                actions = self.commands.let_time_pass(now_s)
                actions += self.commands.loaders.let_time_pass(now_s)
                if self.line.gives_up(now_s):
                    actions.append(GiveUpWorkers(absent_s=self.line.absence_limit_s))
                    actions += self.commands.give_up_workers(now_s)
                return actions
            case DataLoaderStarted() | DataLoaderEnded():
                return self.commands.loaders.handle(given, now_s)
            case _:
                return self.commands.handle(given, now_s)
        return []

    def is_end_coming(self, key: WorkerKey) -> bool:
        """Whether a worker has ended and the controller may not have heard of it yet.

        The end of one is reported by the events to come, after the steps that it completed:
        heard before them, a job would have succeeded with a part of its curve missing.
        """
        seq = self.commands.workers.end_seq(key)
        return seq is not None and self.line.buffer.keeps(seq)

    def wake_at(self) -> float | None:
        """When to say `TimePassed` at the latest; None while nothing waits for a time."""
        earliest_s = min(
            self.commands.wake_at(), self.commands.loaders.wake_at(), self.line.wake_at()
        )
        return None if earliest_s == math.inf else earliest_s
