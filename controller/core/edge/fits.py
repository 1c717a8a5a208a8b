"""Whether a message keeps every rule, as one expression for each kind of message.

Nearly all that agents send is sound, and a heartbeat has hundreds of values. The expressions are
made from the same plans as the walk, and are true where it would change and note nothing: so only
what is not sound is walked over, to correct it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from controller.core.edge.rules import (
    CLOCK_TOLERANCE_S,
    MAX_AGE_S,
    AnyReal,
    Many,
    Number,
    Pairs,
    Part,
    Text,
)
from controller.core.edge.walk import PLANS, Plan

# Given a message, and the oldest and the newest moment that it may have.
_Fits = Callable[[Any, float, float], bool]


def is_sound(message: Any, now_s: float) -> bool:
    """Whether a message of a node whose clock is right is within all rules of `fields`."""
    of_kind: _Fits = _KNOWN[message.DESCRIPTOR.name]
    return of_kind(message, max(now_s - MAX_AGE_S, _NO_TIME_S), now_s + CLOCK_TOLERANCE_S)


# Nothing happened before the epoch, and zero means that nobody knows when.
_NO_TIME_S = 5e-324


def _expression(plan: Plan, known: dict[str, Any]) -> str:
    """The rules of one message; what they compare with and call is put into `known`."""
    rules = [
        f"({low!r} <= m.{name} <= {high!r}{_unless_absent(name, is_optional)})"
        for name, low, high, _, is_optional in plan.numbers
    ]
    for name, named in plan.names:
        match_name = known[f"match_{plan.name}_{name}"] = named.pattern.fullmatch
        # Most of the words that may be left out are.
        is_absent = f"not m.{name} or " if match_name("") else ""
        rules.append(f"({is_absent}match_{plan.name}_{name}(m.{name}))")
    rules += [f"len(m.{name}) <= {max_chars}" for name, max_chars, _ in plan.texts]
    rules += [f"oldest_s <= m.{name} <= newest_s" for name in plan.moments]
    rules += [f"len(m.{name}) <= {max_bytes}" for name, max_bytes in plan.data]
    rules += [
        f"(not m.HasField({name!r}) or {kind}(m.{name}, oldest_s, newest_s))"
        for name, kind in plan.parts
    ]
    for oneof, kinds in plan.choices.items():
        known[f"kinds_{plan.name}_{oneof}"] = kinds
        rules.append(
            f"((kind := kinds_{plan.name}_{oneof}.get(chosen := m.WhichOneof({oneof!r}))) is None"
            " or known[kind](getattr(m, chosen), oldest_s, newest_s))"
        )
    for name, many, kind in plan.many:
        known[f"many_{plan.name}_{name}"] = many
        each = kind or "None"
        rules.append(
            f"(not (found := m.{name}) or"
            f" many_fit(found, many_{plan.name}_{name}, {each}, oldest_s, newest_s))"
        )
    for name, pairs in plan.pairs:
        known[f"pairs_{plan.name}_{name}"] = pairs
        rules.append(f"(not (found := m.{name}) or pairs_fit(found, pairs_{plan.name}_{name}))")
    return " and ".join(rules) or "True"


def _unless_absent(name: str, is_optional: bool) -> str:
    return f" or not m.HasField({name!r})" if is_optional else ""


def _many_fit(
    values: Any, many: Many, kind: _Fits | None, oldest_s: float, newest_s: float
) -> bool:
    if len(values) > many.most:
        return False
    match many.each:
        case Part():
            assert kind is not None
            return all(kind(value, oldest_s, newest_s) for value in values)
        case Text(max_chars):
            return all(len(value) <= max_chars for value in values)
        case Number() as number:
            return all(number.reason(value) is None for value in values)


def _pairs_fit(values: Any, pairs: Pairs) -> bool:
    if len(values) > pairs.most:
        return False
    return all(len(key) <= pairs.keys.max_chars for key in values) and _values_fit(
        values.values(), pairs.values
    )


def _values_fit(values: Iterable[Any], rule: Text | Number | AnyReal) -> bool:
    if isinstance(rule, AnyReal):
        return True
    if isinstance(rule, Number):
        return all(rule.reason(value) is None for value in values)
    return all(len(value) <= rule.max_chars for value in values)


def _compiled() -> dict[str, Any]:
    """A function for each kind of message, by its name."""
    known: dict[str, Any] = {"many_fit": _many_fit, "pairs_fit": _pairs_fit}
    known["known"] = known
    for name, plan in PLANS.items():
        source = f"lambda m, oldest_s, newest_s: bool({_expression(plan, known)})"
        known[name] = eval(compile(source, f"<rules of {name}>", "eval"), known)
    return known


_KNOWN = _compiled()
