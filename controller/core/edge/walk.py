"""The rules of `fields`, walked over messages: what cannot be is corrected, or left out.

What does not belong here: who may say what (`gate`), and what a rule makes of a value (`rules`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

# Fields are read by their names, as the rules name them.
from typing import Any

from controller.core.edge.fields import FIELDS
from controller.core.edge.rules import (
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
from outlast.v1 import agents_pb2

# Told why, and at which field.
Note = Callable[[Reason, str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """What the walk of one message needs to know, and what counts its findings."""

    now_s: float
    # How far the controller's clock is ahead of the node's.
    offset_s: float
    corrected: Note
    dropped: Note


@dataclass(slots=True)
class Plan:
    """The rules of one message's fields, sorted by kind: a heartbeat has hundreds of values."""

    name: str
    numbers: list[tuple[str, float, float, Number, bool]] = field(default_factory=list)
    texts: list[tuple[str, int, Text]] = field(default_factory=list)
    names: list[tuple[str, Name]] = field(default_factory=list)
    moments: list[str] = field(default_factory=list)
    data: list[tuple[str, int]] = field(default_factory=list)
    parts: list[tuple[str, str]] = field(default_factory=list)
    # Parts of which only one is there, by the name of their oneof.
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    many: list[tuple[str, Many, str]] = field(default_factory=list)
    pairs: list[tuple[str, Pairs]] = field(default_factory=list)

    def check(self, message: Any, check: Check) -> None:
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
        for oneof, kinds in self.choices.items():
            chosen = message.WhichOneof(oneof)
            if chosen in kinds:
                PLANS[kinds[chosen]].check(getattr(message, chosen), check)
        for name, kind in self.parts:
            if message.HasField(name):
                PLANS[kind].check(getattr(message, name), check)
        for name, many, kind in self.many:
            if values := getattr(message, name):
                self._check_many(values, many, kind, f"{self.name}.{name}", check)
        for name, pairs in self.pairs:
            if values := getattr(message, name):
                _check_pairs(values, pairs, f"{self.name}.{name}", check)

    def _check_moment(self, message: Any, name: str, check: Check) -> None:
        at_s = getattr(message, name)
        plausible_s = plausible_time_s(at_s, check.now_s, check.offset_s)
        if plausible_s == at_s:
            return
        if not check.offset_s and at_s != 0.0:
            check.corrected(Reason.IMPLAUSIBLE_TIME, f"{self.name}.{name}")
        setattr(message, name, plausible_s)

    def _check_many(self, values: Any, many: Many, kind: str, where: str, check: Check) -> None:
        fit: list[Any] = []
        for place, value in enumerate(values):
            if place >= many.most:
                check.dropped(Reason.TOO_MANY, where)
                break
            match many.each:
                case Part():
                    try:
                        PLANS[kind].check(value, check)
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
            keep(values, fit)


def _check_pairs(values: Any, pairs: Pairs, where: str, check: Check) -> None:
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
        elif isinstance(pairs.values, Text) and len(values[key]) > pairs.values.max_chars:
            check.corrected(Reason.TOO_LONG, where)
            values[key] = pairs.values.cut(values[key])
        if reason is not None:
            check.dropped(reason, where)
            del values[key]


def keep(repeated: Any, fit: list[Any]) -> None:
    """Leave these elements in a repeated field."""
    # Copied first: elements belong to the field that is emptied.
    kept = [_copy(each) for each in fit]
    del repeated[:]
    repeated.extend(kept)


def _copy(value: Any) -> Any:
    if not hasattr(value, "CopyFrom"):
        return value
    copied = type(value)()
    copied.CopyFrom(value)
    return copied


def _plan(descriptor: Any) -> Plan:
    plan = Plan(descriptor.name)
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
            case Part() if found.containing_oneof is not None:
                plan.choices.setdefault(found.containing_oneof.name, {})[name] = kind
            case Part():
                plan.parts.append((name, kind))
            case Many():
                plan.many.append((name, rule, kind))
            case Pairs():
                plan.pairs.append((name, rule))
            case AnyReal() | Flag():
                pass
    return plan


def _messages(descriptor: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Every message that may be inside of one, itself included, by its name."""
    if descriptor.name not in found and not descriptor.GetOptions().map_entry:
        found[descriptor.name] = descriptor
        for each in descriptor.fields:
            if each.message_type is not None:
                _messages(each.message_type, found)
    return found


MESSAGES = _messages(agents_pb2.AgentMessage.DESCRIPTOR, {})
PLANS = {name: _plan(descriptor) for name, descriptor in MESSAGES.items()}
