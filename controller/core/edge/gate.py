"""The gate for what agents send: every field by its rule, every report by who sent it.

Nothing from a node reaches a table, the machine or the journal before it has passed here.
What cannot be is corrected where the rest of the message still counts, and left out
otherwise; both are counted.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from controller.core.changes import State
from controller.core.edge.entitled import (
    MAX_UNKNOWN_WORKERS,
    is_present,
    is_within,
    may_stop_unknown,
    refusal,
)
from controller.core.edge.fits import is_sound
from controller.core.edge.rules import CLOCK_TOLERANCE_S, MAX_DURATION_S, Reason, Unfit
from controller.core.edge.walk import PLANS, Check, keep
from outlast.ids import CommandId, JobId, NodeId
from outlast.v1 import agents_pb2

# Nodes whose clock is known to be wrong; more than there may be sessions is not kept.
_MAX_OFFSETS = 16_384


class Notes(Protocol):
    """Counts what was left out, and what was corrected."""

    def dropped(self, node: NodeId, reason: Reason, where: str) -> None:
        """Something was left out."""

    def corrected(self, node: NodeId, reason: Reason, where: str) -> None:
        """A value was replaced by a harmless one."""

    def clock_is_off(self, node: NodeId, offset_s: float) -> None:
        """The clock of a node is behind ours by this, and what it says is corrected for it."""


class Gate:
    """Checks the messages of every agent, in place."""

    def __init__(self, state: State, note: Notes) -> None:
        self._state = state
        self._note = note
        # How far our clock is ahead of a node's, of those that are off by more than a little.
        self._offsets_s: dict[NodeId, float] = {}

    def hello(self, hello: agents_pb2.Hello, now_s: float) -> Unfit | None:
        """Check an agent's first message, in place; what makes it worthless, if anything does."""
        node = NodeId(hello.node_id[:256])
        check = self._check(node, now_s, 0.0)
        try:
            PLANS["Hello"].check(hello, check)
        except Unfit as unfit:
            self._note.dropped(node, unfit.reason, unfit.field)
            return unfit
        keep(hello.worker_statuses, self._fit_statuses(node, hello))
        return None

    def inventory(
        self, hello: agents_pb2.Hello, inventory: agents_pb2.Inventory, now_s: float
    ) -> Unfit | None:
        """Check what had no room in a hello, and add it there; as `hello` otherwise."""
        node = NodeId(hello.node_id)
        try:
            PLANS["Inventory"].check(inventory, self._check(node, now_s, 0.0))
        except Unfit as unfit:
            self._note.dropped(node, unfit.reason, unfit.field)
            return unfit
        hello.worker_statuses.extend(inventory.worker_statuses)
        keep(hello.worker_statuses, self._fit_statuses(node, hello))
        return None

    def accepts(self, node: NodeId, message: agents_pb2.AgentMessage, now_s: float) -> bool:
        """Check any later message, in place; whether anything of it is left to be taken in.

        An event that is left out is to be acknowledged all the same, or it comes again for ever.
        """
        kind = message.WhichOneof("kind")
        if kind == "heartbeat":
            self._note_clock(node, message.heartbeat.at_s, now_s)
        offset_s = self._offsets_s.get(node, 0.0)
        try:
            if kind in (None, "hello", "inventory"):
                # The latter two only begin a session.
                raise Unfit(Reason.UNKNOWN_KIND, "kind")
            if offset_s or not is_sound(message, now_s):
                PLANS["AgentMessage"].check(message, self._check(node, now_s, offset_s))
            if kind == "heartbeat":
                self._check_ranks(node, message.heartbeat)
            elif kind == "event":
                self._check_event(node, message.event)
        except Unfit as unfit:
            self._note.dropped(node, unfit.reason, unfit.field)
            return False
        return True

    def forget(self, node: NodeId) -> None:
        """The node's session has ended."""
        self._offsets_s.pop(node, None)

    def _note_clock(self, node: NodeId, at_s: float, now_s: float) -> None:
        """Learn from a heartbeat, which is sent as soon as it is made, how the clocks differ."""
        offset_s = now_s - at_s
        if not at_s > 0.0 or not abs(offset_s) < MAX_DURATION_S:
            return  # That is no clock.
        if abs(offset_s) <= CLOCK_TOLERANCE_S:
            self._offsets_s.pop(node, None)
        elif node in self._offsets_s or len(self._offsets_s) < _MAX_OFFSETS:
            self._offsets_s[node] = offset_s
            self._note.clock_is_off(node, offset_s)

    def _check(self, node: NodeId, now_s: float, offset_s: float) -> Check:
        return Check(
            now_s,
            offset_s,
            partial(self._note.corrected, node),
            partial(self._note.dropped, node),
        )

    # Who may say what

    def _fit_statuses(self, node: NodeId, hello: agents_pb2.Hello) -> list[agents_pb2.WorkerStatus]:
        fit = []
        unknown: set[tuple[str, int]] = set()
        for status in hello.worker_statuses:
            job_id = JobId(status.job_id)
            whole = refusal(self._state, node, job_id, status.attempt)
            of_rank = refusal(self._state, node, job_id, status.attempt, status.rank)
            if whole is None and of_rank is None:
                fit.append(status)
            elif whole is None or not status.running:
                # Of a rank that is not its own, or the end of something that nobody knows.
                self._note.dropped(node, of_rank or Reason.NOT_PLACED, "hello.worker_statuses")
            elif len(unknown) < MAX_UNKNOWN_WORKERS and may_stop_unknown(self._state, node):
                unknown.add((status.job_id, status.attempt))
                fit.append(status)
            else:
                self._note.dropped(node, Reason.TOO_MANY, "hello.worker_statuses")
        return fit

    def _check_ranks(self, node: NodeId, beat: agents_pb2.Heartbeat) -> None:
        state, fit = self._state, []
        for summary in beat.ranks:
            job_id, attempt = JobId(summary.job_id), summary.attempt
            reason = refusal(state, node, job_id, attempt, summary.rank)
            if reason is None and not is_present(state, job_id, attempt):
                continue  # Workers of an earlier attempt that are being stopped.
            if reason is None and not is_within(
                state, job_id, summary.completed_step, summary.resumed_step
            ):
                reason = Reason.OUT_OF_RANGE
            if reason is None:
                fit.append(summary)
            else:
                self._note.dropped(node, reason, "heartbeat.ranks")
        if len(fit) < len(beat.ranks):
            keep(beat.ranks, fit)

    def _check_event(self, node: NodeId, event: agents_pb2.AgentEvent) -> None:
        match event.WhichOneof("kind"):
            case None:
                raise Unfit(Reason.UNKNOWN_KIND, "event.kind")
            case "command_result":
                # The machine closes a command for the node that it was opened for.
                self._check_result(node, event.command_result)
            case "host_sign":
                # Of the node itself, or of the job that runs there: the detectors compare.
                if event.job_id:
                    self._must(node, event)
            case "worker_exited":
                exited = event.worker_exited
                self._must(node, event, exited.rank)
                if not is_within(self._state, JobId(event.job_id), exited.exit.completed_step):
                    self._note.corrected(node, Reason.OUT_OF_RANGE, "exit.completed_step")
                    exited.exit.completed_step = -1
            case "step_reports":
                self._must(node, event)
                self._check_reports(node, event)
            case "progress":
                self._must(node, event)
                self._must_be_within(event, event.progress.completed_step)
                self._must_be_within(event, event.progress.resumed_step)
            case "checkpoint_committed":
                self._must(node, event)
                self._must_be_within(event, event.checkpoint_committed.step)
            case "checkpoint_trouble":
                self._must(node, event)
                self._must_be_within(event, event.checkpoint_trouble.step)

    def _must(self, node: NodeId, event: agents_pb2.AgentEvent, rank: int | None = None) -> None:
        reason = refusal(self._state, node, JobId(event.job_id), event.attempt, rank)
        if reason is not None:
            raise Unfit(reason, f"event.{event.WhichOneof('kind')}")

    def _must_be_within(self, event: agents_pb2.AgentEvent, step: int) -> None:
        if not is_within(self._state, JobId(event.job_id), step):
            raise Unfit(Reason.OUT_OF_RANGE, f"event.{event.WhichOneof('kind')}.step")

    def _check_result(self, node: NodeId, result: agents_pb2.CommandResult) -> None:
        command = self._state.commands.get(CommandId(result.command_id))
        job_id = None if command is None else command.job
        if job_id is None or job_id not in self._state.jobs:
            return
        if not is_within(self._state, job_id, result.completed_step):
            self._note.corrected(node, Reason.OUT_OF_RANGE, "command_result.completed_step")
            result.completed_step = -1

    def _check_reports(self, node: NodeId, event: agents_pb2.AgentEvent) -> None:
        reports, fit = event.step_reports.reports, []
        job_id = JobId(event.job_id)
        for report in reports:
            attempt = report.attempt or event.attempt
            reason = (
                None if attempt == event.attempt else refusal(self._state, node, job_id, attempt)
            )
            if reason is None and not is_within(self._state, job_id, report.step):
                reason = Reason.OUT_OF_RANGE
            if reason is None:
                fit.append(report)
            else:
                self._note.dropped(node, reason, "step_reports.reports")
        if len(fit) < len(reports):
            keep(reports, fit)
