"""Invariant 12: an agent keeps its word, whatever the controller makes of it.

The controller repeats commands, waits with a limit and believes little of what it hears,
so that most mistakes of an agent cost time and break nothing. Here they are held against
the agent itself: every command is answered, once; what was stopped has ended and does not
start again; an event that lasts stays until the controller has it; workers are given up
when the time has come, and no sooner.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from controller.agent.core.buffer import Weight
from controller.core.records import CommandRecord, ForgetJob, StopWorkers
from controller.sim.checkers import Violation
from outlast.ids import JobId

if TYPE_CHECKING:
    from controller.agent.core.machine import AgentMachine
    from controller.sim.agent import Agent, AgentEvent

# SIGKILL, the wait for what is left, and steps that take a moment.
STOP_SLACK_S = 30.0
# What the controller's configuration has where nobody changes it.
LEAST_ABSENCE_S = 1800.0 - 1.0
# From the limit of an absence until workers that were asked to stop are killed.
GIVE_UP_SLACK_S = 45.0


class Promises:
    """What one agent owes."""

    def __init__(self, agent: Agent, machine: AgentMachine[AgentEvent]) -> None:
        self._agent, self._machine = agent, machine
        # Commands that are to be answered, and since when.
        self._owed: dict[str, tuple[CommandRecord, float]] = {}
        # Events that last and that the controller has not got.
        self._on_the_way: dict[int, None] = {}
        self._absent_since_s = agent.world.now_s

    # Commands

    def received(self, record: CommandRecord) -> None:
        """A command has come in."""
        since_s = self._owed.get(record.command_id, (record, self._agent.world.now_s))[1]
        self._owed[record.command_id] = (record, since_s)
        if isinstance(record.command, StopWorkers | ForgetJob) and record.job is not None:
            stopped = self._agent.node.stopped
            stopped[record.job] = max(stopped.get(record.job, 0), record.attempt)

    def taken_in(self) -> None:
        """The machine has done what it does at once."""
        now_s = self._agent.world.now_s
        for command_id, (record, since_s) in self._owed.items():
            if not self._machine.commands.is_under_way(command_id):
                self._fail(f"{command_id} is not under way and has no answer")
            if isinstance(record.command, StopWorkers):
                waited_s = now_s - since_s
                if waited_s > record.command.timeout_s + STOP_SLACK_S:
                    self._fail(f"{command_id} has no answer after {waited_s:.0f} s")

    def answered(self, record: CommandRecord, *, ok: bool) -> None:
        """A command is answered."""
        del self._owed[record.command_id]
        node, job = self._agent.node, record.job or JobId("")
        if isinstance(record.command, StopWorkers) and ok and not node.hides_workers:
            for worker in self._agent.running(job):
                if worker.attempt <= record.attempt and not worker.is_hidden:
                    self._fail(f"{record.command_id} is done, and {worker.key} runs")

    def answered_again(self, command_id: str) -> None:
        """There is an answer to a command that has one."""
        self._fail(f"{command_id} is answered again")

    def forked(self, record: CommandRecord) -> None:
        """Workers of this start are there."""
        assert record.job is not None
        if record.attempt <= self._agent.node.stopped.get(record.job, 0):
            self._fail(f"{record.command_id} starts workers that were stopped here")

    # Events

    def emitted(self, seq: int, weight: Weight) -> None:
        """An event is kept until the controller has it."""
        if weight is Weight.LASTING:
            self._on_the_way[seq] = None

    def delivered(self, seq: int) -> None:
        """The controller has got an event."""
        self._on_the_way.pop(seq, None)

    def acknowledged(self, seq: int) -> None:
        """The controller has said that it has all up to this one."""
        buffer = self._machine.line.buffer
        kept = buffer.after(0)
        if kept and kept[0].seq <= seq <= buffer.last_seq:
            self._fail(f"event {kept[0].seq} is kept, and {seq} was acknowledged")
        if self._on_the_way and not buffer.num_dropped:
            numbers = {event.seq for event in kept}
            for lost in self._on_the_way:
                if lost not in numbers:
                    self._fail(f"event {lost} never arrived and is not kept")

    # Absence

    def session_lost(self) -> None:
        """There is no controller from now on, if there was one."""
        if self._absent_since_s == math.inf:
            self._absent_since_s = self._agent.world.now_s

    def welcomed(self) -> None:
        """There is one again."""
        absent_s = self._agent.world.now_s - self._absent_since_s
        self._absent_since_s = math.inf
        if absent_s < self._machine.line.absence_limit_s + GIVE_UP_SLACK_S:
            return
        for worker in self._agent.running():
            if not worker.told:
                self._fail(f"{worker.key} runs after {absent_s:.0f} s without a controller")

    def gave_up(self) -> None:
        """Workers are stopped because there is no controller."""
        absent_s = self._agent.world.now_s - self._absent_since_s
        if absent_s < LEAST_ABSENCE_S:
            self._fail(f"workers are given up after {absent_s:.0f} s without a controller")

    def _fail(self, what: str) -> None:
        hours, node = self._agent.world.hours, self._agent.node.name
        raise Violation(f"invariant 12 at {hours:.4f} h: {node}: {what}")
