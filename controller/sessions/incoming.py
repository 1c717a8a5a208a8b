"""The gate for what agents send: every field by its rule, every report by who sent it.

Nothing from a node reaches a table, the machine or the journal before it has passed here.
What cannot be is corrected where the rest of the message still counts, and left out
otherwise; both are counted by reason and logged, at most a line a minute for each node and
reason. The rules are data in `controller.core.edge`; here they are walked over messages.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from controller.core.edge.entitled import (
    MAX_UNKNOWN_WORKERS,
    is_present,
    is_within,
    may_stop_unknown,
    refusal,
)
from controller.core.edge.fields import FIELDS
from controller.core.edge.rules import (
    CLOCK_TOLERANCE_S,
    MAX_DURATION_S,
    AnyReal,
    Data,
    Flag,
    Many,
    Moment,
    Name,
    Number,
    Pairs,
    Part,
    Reason,
    Text,
    Unfit,
    plausible_time_s,
)
from controller.core.facts import State
from controller.ratelimit import RateLimitedLog
from outlast.ids import CommandId, JobId, NodeId
from outlast.v1 import agents_pb2

logger = logging.getLogger(__name__)

DROPPED, CORRECTED = "dropped", "corrected"
# Nodes whose clock is known to be wrong; more than there may be sessions is not kept.
_MAX_OFFSETS = 16_384


class Incoming:
    """Checks the messages of every agent, and counts what it dropped and corrected."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._log = RateLimitedLog(logger)
        # How far our clock is ahead of a node's, of those that are off by more than a little.
        self._offsets_s: dict[NodeId, float] = {}
        # By what was done and why.
        self.counts: Counter[tuple[str, Reason]] = Counter()

    def hello(self, hello: agents_pb2.Hello, now_s: float) -> Unfit | None:
        """Check an agent's first message, in place; what makes it worthless, if anything does."""
        node = NodeId(hello.node_id[:256])
        check = _Check(self, node, now_s, 0.0)
        try:
            _PLANS["Hello"].check(hello, check)
        except Unfit as unfit:
            self.dropped(node, unfit.reason, unfit.field)
            return unfit
        _keep(hello.worker_statuses, self._fit_statuses(node, hello))
        return None

    def inventory(
        self, hello: agents_pb2.Hello, inventory: agents_pb2.Inventory, now_s: float
    ) -> Unfit | None:
        """Check what had no room in a hello, and add it there; as `hello` otherwise."""
        node = NodeId(hello.node_id)
        try:
            _PLANS["Inventory"].check(inventory, _Check(self, node, now_s, 0.0))
        except Unfit as unfit:
            self.dropped(node, unfit.reason, unfit.field)
            return unfit
        hello.worker_statuses.extend(inventory.worker_statuses)
        _keep(hello.worker_statuses, self._fit_statuses(node, hello))
        return None

    def accepts(self, node: NodeId, message: agents_pb2.AgentMessage, now_s: float) -> bool:
        """Check any later message, in place; whether anything of it is left to be taken in.

        An event that is left out is to be acknowledged all the same, or it comes again for ever.
        """
        kind = message.WhichOneof("kind")
        if kind == "heartbeat":
            self._note_clock(node, message.heartbeat.at_s, now_s)
        check = _Check(self, node, now_s, self._offsets_s.get(node, 0.0))
        try:
            if kind in (None, "hello", "inventory"):
                # The latter two only begin a session.
                raise Unfit(Reason.UNKNOWN_KIND, "kind")
            _PLANS["AgentMessage"].check(message, check)
            if kind == "heartbeat":
                self._check_ranks(node, message.heartbeat)
            elif kind == "event":
                self._check_event(node, message.event)
        except Unfit as unfit:
            self.dropped(node, unfit.reason, unfit.field)
            return False
        return True

    def forget(self, node: NodeId) -> None:
        """The node's session has ended."""
        self._offsets_s.pop(node, None)

    def dropped(self, node: NodeId, reason: Reason, where: str) -> None:
        """Note that something was left out."""
        self._count(DROPPED, node, reason, where)

    def corrected(self, node: NodeId, reason: Reason, where: str) -> None:
        """Note that a value was replaced by a harmless one."""
        self._count(CORRECTED, node, reason, where)

    def _count(self, what: str, node: NodeId, reason: Reason, where: str) -> None:
        self.counts[what, reason] += 1
        self._log.warning(
            (node, what, reason),
            "report %s: node=%s reason=%s field=%s",
            what,
            node,
            reason,
            where,
        )

    def _note_clock(self, node: NodeId, at_s: float, now_s: float) -> None:
        """Learn from a heartbeat, which is sent as soon as it is made, how the clocks differ."""
        offset_s = now_s - at_s
        if not at_s > 0.0 or not abs(offset_s) < MAX_DURATION_S:
            return  # That is no clock.
        if abs(offset_s) <= CLOCK_TOLERANCE_S:
            self._offsets_s.pop(node, None)
        elif node in self._offsets_s or len(self._offsets_s) < _MAX_OFFSETS:
            self._offsets_s[node] = offset_s
            self._log.warning(
                (node, "clock"),
                "node clock is off and corrected for: node=%s by_s=%.1f",
                node,
                -offset_s,
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
                self.dropped(node, of_rank or Reason.NOT_PLACED, "hello.worker_statuses")
            elif len(unknown) < MAX_UNKNOWN_WORKERS and may_stop_unknown(self._state, node):
                unknown.add((status.job_id, status.attempt))
                fit.append(status)
            else:
                self.dropped(node, Reason.TOO_MANY, "hello.worker_statuses")
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
                self.dropped(node, reason, "heartbeat.ranks")
        if len(fit) < len(beat.ranks):
            _keep(beat.ranks, fit)

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
                    self.corrected(node, Reason.OUT_OF_RANGE, "exit.completed_step")
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
            self.corrected(node, Reason.OUT_OF_RANGE, "command_result.completed_step")
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
                self.dropped(node, reason, "step_reports.reports")
        if len(fit) < len(reports):
            _keep(reports, fit)


@dataclass(frozen=True, slots=True)
class _Check:
    """What the walk of one message needs to know."""

    incoming: Incoming
    node: NodeId
    now_s: float
    offset_s: float

    def corrected(self, reason: Reason, where: str) -> None:
        self.incoming.corrected(self.node, reason, where)

    def dropped(self, reason: Reason, where: str) -> None:
        self.incoming.dropped(self.node, reason, where)


@dataclass(slots=True)
class _Plan:
    """The rules of one message's fields, sorted by kind: a heartbeat has hundreds of values."""

    name: str
    numbers: list[tuple[str, float, float, Number, bool]] = field(default_factory=list)
    texts: list[tuple[str, int, Text]] = field(default_factory=list)
    names: list[tuple[str, Name]] = field(default_factory=list)
    moments: list[str] = field(default_factory=list)
    data: list[tuple[str, int]] = field(default_factory=list)
    parts: list[tuple[str, str]] = field(default_factory=list)
    many: list[tuple[str, Many, str]] = field(default_factory=list)
    pairs: list[tuple[str, Pairs]] = field(default_factory=list)

    def check(self, message: Any, check: _Check) -> None:
        """Correct what can be corrected.

        Raises:
            Unfit: nothing of this message counts.
        """
        for name, low, high, number, is_optional in self.numbers:
            value = getattr(message, name)
            # NaN is in no range.
            if low <= value <= high or (is_optional and not message.HasField(name)):
                continue
            reason = number.reason(value) or Reason.OUT_OF_RANGE
            if number.instead is None:
                raise Unfit(reason, f"{self.name}.{name}")
            check.corrected(reason, f"{self.name}.{name}")
            setattr(message, name, number.instead)
        for name, rule in self.names:
            text = getattr(message, name)
            if rule.pattern.fullmatch(text):
                continue
            if rule.instead is None:
                raise Unfit(rule.reason, f"{self.name}.{name}")
            check.corrected(rule.reason, f"{self.name}.{name}")
            setattr(message, name, rule.instead)
        for name, max_chars, text_rule in self.texts:
            text = getattr(message, name)
            if len(text) > max_chars:
                check.corrected(Reason.TOO_LONG, f"{self.name}.{name}")
                setattr(message, name, text_rule.cut(text))
        for name in self.moments:
            self._check_moment(message, name, check)
        for name, max_bytes in self.data:
            data = getattr(message, name)
            if len(data) > max_bytes:
                check.corrected(Reason.TOO_LONG, f"{self.name}.{name}")
                setattr(message, name, data[:max_bytes])
        for name, kind in self.parts:
            if message.HasField(name):
                _PLANS[kind].check(getattr(message, name), check)
        for name, many, kind in self.many:
            if values := getattr(message, name):
                self._check_many(values, many, kind, f"{self.name}.{name}", check)
        for name, pairs in self.pairs:
            if values := getattr(message, name):
                _check_pairs(values, pairs, f"{self.name}.{name}", check)

    def _check_moment(self, message: Any, name: str, check: _Check) -> None:
        at_s = getattr(message, name)
        plausible_s = plausible_time_s(at_s, check.now_s, check.offset_s)
        if plausible_s == at_s:
            return
        if not check.offset_s and at_s != 0.0:
            check.corrected(Reason.IMPLAUSIBLE_TIME, f"{self.name}.{name}")
        setattr(message, name, plausible_s)

    def _check_many(self, values: Any, many: Many, kind: str, where: str, check: _Check) -> None:
        fit: list[Any] = []
        for place, value in enumerate(values):
            if place >= many.most:
                check.dropped(Reason.TOO_MANY, where)
                break
            match many.each:
                case Part():
                    try:
                        _PLANS[kind].check(value, check)
                    except Unfit as unfit:
                        check.dropped(unfit.reason, unfit.field)
                        continue
                    fit.append(value)
                case Text() as text:
                    fit.append(text.cut(value))
                case Number() as number:
                    if number.reason(value) is None:
                        fit.append(value)
        if len(fit) < len(values) or isinstance(many.each, Text):
            _keep(values, fit)


def _check_pairs(values: Any, pairs: Pairs, where: str, check: _Check) -> None:
    if len(values) > pairs.most:
        check.dropped(Reason.TOO_MANY, where)
        for key in list(values)[pairs.most :]:
            del values[key]
    for key in list(values):
        reason: Reason | None = None
        if len(key) > pairs.keys.max_chars:
            reason = Reason.TOO_LONG
        elif isinstance(pairs.values, Number):
            reason = pairs.values.reason(values[key])
        elif len(values[key]) > pairs.values.max_chars:
            check.corrected(Reason.TOO_LONG, where)
            values[key] = pairs.values.cut(values[key])
        if reason is not None:
            check.dropped(reason, where)
            del values[key]


def _keep(repeated: Any, fit: list[Any]) -> None:
    """Leave these elements in a repeated field."""
    # Copied first: elements belong to the field that is emptied.
    kept = [_copy(each) for each in fit]
    del repeated[:]
    repeated.extend(kept)


def _copy(value: Any) -> Any:
    if not isinstance(value, Message):
        return value
    copied = type(value)()
    copied.CopyFrom(value)
    return copied


def _plan(descriptor: Descriptor) -> _Plan:
    plan = _Plan(descriptor.name)
    for name, rule in FIELDS.get(descriptor.name, {}).items():
        found = descriptor.fields_by_name[name]
        kind = "" if found.message_type is None else found.message_type.name
        match rule:
            case Number(low, high):
                plan.numbers.append((name, low, high, rule, found.has_presence))
            case Text(max_chars):
                plan.texts.append((name, max_chars, rule))
            case Name():
                plan.names.append((name, rule))
            case Moment():
                plan.moments.append(name)
            case Data(max_bytes):
                plan.data.append((name, max_bytes))
            case Part():
                plan.parts.append((name, kind))
            case Many():
                plan.many.append((name, rule, kind))
            case Pairs():
                plan.pairs.append((name, rule))
            case AnyReal() | Flag():
                pass
    return plan


def _messages(descriptor: Descriptor, found: dict[str, Descriptor]) -> dict[str, Descriptor]:
    """Every message that may be inside of one, itself included, by its name."""
    if descriptor.name not in found and not descriptor.GetOptions().map_entry:
        found[descriptor.name] = descriptor
        for each in descriptor.fields:
            if each.message_type is not None:
                _messages(each.message_type, found)
    return found


MESSAGES = _messages(agents_pb2.AgentMessage.DESCRIPTOR, {})
_PLANS = {name: _plan(descriptor) for name, descriptor in MESSAGES.items()}
