"""Invariant 12: an agent keeps its word, whatever the controller makes of it.

The controller repeats commands, waits with a limit and believes little of what it hears,
so that most mistakes of an agent cost time and break nothing. Here they are held against
the agent itself: every command is answered, once; what was stopped has ended and does not
start again; a command begins and is answered once the ledger that says so is on disk, and
its repeats get the same answer; each worker's end is reported once, and progress once in each
session and at the end; an event that lasts stays until the controller has it; workers are
given up when the time has come, and no sooner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from controller.agent.core.buffer import Weight
from controller.agent.core.inputs import Command
from controller.agent.core.ledger import CommandKind, Result
from controller.agent.core.reports import AttemptKey
from controller.agent.core.workers import WorkerKey
from controller.sim.violation import Violation
from outlast.failures import ErrorKind
from outlast.ids import JobId
from outlast.v1 import agents_pb2

if TYPE_CHECKING:
    from controller.agent.core.machine import AgentMachine
    from controller.sim.agent import Agent

# SIGKILL, the wait for what is left, and steps that take a moment.
STOP_SLACK_S = 30.0
# What the controller's configuration has where nobody changes it.
LEAST_ABSENCE_S = 1800.0 - 1.0
# Fewer than an agent remembers.
MAX_ANSWERS = 20
# Of workers whose ends were reported, so many are remembered: of dozens of attempts.
MAX_ENDS = 64
# From the limit of an absence until workers that were asked to stop are killed.
GIVE_UP_SLACK_S = 45.0


class Promises:
    """What one agent owes."""

    def __init__(self, agent: Agent, machine: AgentMachine[agents_pb2.AgentEvent]) -> None:
        self._agent, self._machine = agent, machine
        # Commands that are to be answered, and since when.
        self._owed: dict[str, tuple[Command, float]] = {}
        # Events that last and that the controller has not got.
        self._on_the_way: dict[int, None] = {}
        # Commands since whose beginning or end the ledger was not written.
        self._not_kept: dict[str, None] = {}
        # Commands of those whose end is on disk.
        self._ends_kept: dict[str, None] = {}
        # The first answers of the newest commands.
        self._answers: dict[str, Result] = {}
        # The newest workers whose ends were reported, and the progress of each attempt that was
        # reported last.
        self._ended: dict[WorkerKey, None] = {}
        # The events that report them.
        self._ends: dict[WorkerKey, int] = {}
        self._progress: dict[AttemptKey, int] = {}
        # Attempts whose progress was reported since the last welcome.
        self._known: set[AttemptKey] = set()
        self._absent_since_s = agent.world.now_s

    # Commands

    def received(self, command: Command) -> None:
        """A command has come in."""
        since_s = self._owed.get(command.command_id, (command, self._agent.world.now_s))[1]
        is_known = self._machine.commands.ledger.result(command.command_id) is not None
        if is_known:
            self._ends_kept[command.command_id] = None
        elif command.command_id not in self._owed:
            self._not_kept[command.command_id] = None
        self._owed[command.command_id] = (command, since_s)
        if command.kind in (CommandKind.STOP, CommandKind.FORGET) and command.job_id:
            stopped, job_id = self._agent.node.stopped, JobId(command.job_id)
            stopped[job_id] = max(stopped.get(job_id, 0), command.attempt)

    def taken_in(self) -> None:
        """The machine has done what it does at once."""
        now_s = self._agent.world.now_s
        for command_id, (command, since_s) in self._owed.items():
            if not self._machine.commands.is_under_way(command_id):
                self.fail(f"{command_id} is not under way and has no answer")
            if command.kind is CommandKind.STOP:
                waited_s = now_s - since_s
                if waited_s > command.timeout_s + STOP_SLACK_S:
                    self.fail(f"{command_id} has no answer after {waited_s:.0f} s")

    def ledger_kept(self) -> None:
        """The ledger is on disk as it is now."""
        self._not_kept.clear()
        for command_id in self._owed:
            if self._machine.commands.ledger.result(command_id) is not None:
                self._ends_kept[command_id] = None

    def step_begins(self, command_id: str) -> None:
        """A step of a command is about to be done."""
        if command_id in self._not_kept:
            self.fail(f"{command_id} begins before it is on disk that it was taken")

    def answered(self, command: Command, result: Result) -> None:
        """A command is answered."""
        command_id = command.command_id
        del self._owed[command_id]
        known = self._answers.get(command_id)
        is_refused = result.error_kind is ErrorKind.STALE
        if command_id not in self._ends_kept and not is_refused:
            self.fail(f"{command_id} is answered before that is on disk")
        self._ends_kept.pop(command_id, None)
        may_be_tried_again = command.kind is CommandKind.FORGET
        if known is not None and known != result and not may_be_tried_again:
            self.fail(f"{command_id} has another answer: {result.detail or result.ok}")
        self._answers[command_id] = result
        if len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        node, job = self._agent.node, JobId(command.job_id)
        if command.kind is CommandKind.STOP and result.ok and not node.hides_workers:
            for worker in self._agent.running(job):
                if worker.attempt <= command.attempt and not worker.is_hidden:
                    self.fail(f"{command.command_id} is done, and {worker.key} runs")
            if not command.keep:
                self.nobody_is_kept(command)

    def answered_again(self, command_id: str) -> None:
        """There is an answer to a command that has one."""
        self.fail(f"{command_id} is answered again")

    def forked(self, command: Command) -> None:
        """Workers of this start are there."""
        if command.attempt <= self._agent.node.stopped.get(JobId(command.job_id), 0):
            self.fail(f"{command.command_id} starts workers that were stopped here")
        kept = [worker.key for worker in self._agent.all_kept()]
        for key in kept:
            if key.job_id != command.job_id or len(kept) > len(command.ranks):
                self.fail(f"{command.command_id} starts workers beside the kept {key}")

    def nobody_is_kept(self, command: Command) -> None:
        """Of a job, once a command has ended its processes."""
        for worker in self._agent.all_kept():
            if worker.job_id == command.job_id and worker.attempt <= command.attempt:
                self.fail(f"{command.command_id} is done, and {worker.key} is kept")

    # Workers

    def end_reported(self, key: WorkerKey) -> None:
        """The end of a worker is about to be reported."""
        if key in self._ended:
            self.fail(f"the end of {key} is reported again")
        self._ended[key] = None
        if len(self._ended) > MAX_ENDS:
            del self._ended[next(iter(self._ended))]

    def worker_ended(self, key: WorkerKey) -> None:
        """A worker has ended, and the machine has taken it in."""
        if key not in self._ended:
            self.fail(f"the end of {key} is not reported")

    def progress_made(self, key: AttemptKey, completed_step: int, *, is_last: bool) -> None:
        """Progress of an attempt is about to be reported."""
        step = self._progress.get(key, -1)
        is_again = key in self._known
        if completed_step < step or (is_again and completed_step == step):
            self.fail(f"step {completed_step} of {key} is reported after step {step}")
        if is_again and not is_last:
            self.fail(f"progress of {key} is reported again in a session, and heartbeats say it")
        self._progress[key] = completed_step
        if len(self._progress) > MAX_ENDS:
            del self._progress[next(iter(self._progress))]
        self._known.add(key)

    def said_hello(self, statuses: Iterable[agents_pb2.WorkerStatus]) -> None:
        """The agent says which workers it has."""
        for status in statuses:
            key = WorkerKey(status.job_id, status.attempt, status.rank)
            worker = self._agent.workers.get(key)
            if worker is not None and worker.is_hidden:
                continue  # Seed 450: of one that the node hid, its machine knows no end.
            if not status.running and self._ends.get(key) in self._on_the_way:
                self.fail(f"hello has the end of {key}, which comes after what it completed")

    # Events

    def emitted(self, event: agents_pb2.AgentEvent, weight: Weight) -> None:
        """An event is kept until the controller has it."""
        if weight is Weight.LASTING:
            self._on_the_way[event.seq] = None
        if event.HasField("worker_exited"):
            key = WorkerKey(event.job_id, event.attempt, event.worker_exited.rank)
            self._ends[key] = event.seq

    def delivered(self, seq: int) -> None:
        """The controller has got an event."""
        self._on_the_way.pop(seq, None)
        self._ends = {key: end for key, end in self._ends.items() if end != seq}

    def acknowledged(self, seq: int) -> None:
        """The controller has said that it has all up to this one."""
        buffer = self._machine.line.buffer
        kept = buffer.after(0)
        if kept and kept[0].seq <= seq <= buffer.last_seq:
            self.fail(f"event {kept[0].seq} is kept, and {seq} was acknowledged")
        if self._on_the_way and not buffer.num_dropped:
            numbers = {event.seq for event in kept}
            for lost in self._on_the_way:
                if lost not in numbers:
                    self.fail(f"event {lost} never arrived and is not kept")

    # Absence

    def session_lost(self) -> None:
        """There is no controller from now on, if there was one."""
        if self._absent_since_s == math.inf:
            self._absent_since_s = self._agent.world.now_s

    def welcomed(self) -> None:
        """There is one again."""
        self._known.clear()
        absent_s = self._agent.world.now_s - self._absent_since_s
        self._absent_since_s = math.inf
        if absent_s < self._machine.line.absence_limit_s + GIVE_UP_SLACK_S:
            return
        for worker in self._agent.running():
            if not worker.is_stopped:
                self.fail(f"{worker.key} runs after {absent_s:.0f} s without a controller")

    def gave_up(self) -> None:
        """Workers are stopped because there is no controller."""
        absent_s = self._agent.world.now_s - self._absent_since_s
        if absent_s < LEAST_ABSENCE_S:
            self.fail(f"workers are given up after {absent_s:.0f} s without a controller")

    def fail(self, what: str) -> None:
        """The agent breaks its word."""
        hours, node = self._agent.world.hours, self._agent.node.name
        raise Violation(f"invariant 12 at {hours:.4f} h: {node}: {what}")
