"""Kinds of rules for the fields of a message, and what each makes of a value.

A rule is data, so that one table can hold those of every field and a test can see that
none is missing. A value that a rule does not allow is either replaced by a harmless one,
because the rest of the message still counts, or makes the whole message worthless: its
identity, or a figure that is its only content.

What does not belong here: messages and how they are walked (`walk`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

# Integers beyond this are not exact in a double, nor in JSON as most programs read it.
MAX_COUNT = 2**53 - 1
# 30 years: longer than any duration that is measured, short enough to be added up.
MAX_DURATION_S = 1e9
# Clocks of nodes and the network's delay; more is a step of some clock.
CLOCK_TOLERANCE_S = 5.0
# Agents keep what happened while no controller was there.
MAX_AGE_S = 30 * 86_400.0


class Reason(StrEnum):
    """Why something was dropped or corrected: the closed set that the metric has as a label."""

    NON_FINITE = "non_finite"
    OUT_OF_RANGE = "out_of_range"
    TOO_LONG = "too_long"
    TOO_MANY = "too_many"
    BAD_NAME = "bad_name"
    UNKNOWN_WORD = "unknown_word"
    UNKNOWN_KIND = "unknown_kind"
    IMPLAUSIBLE_TIME = "implausible_time"
    UNKNOWN_JOB = "unknown_job"
    UNKNOWN_ATTEMPT = "unknown_attempt"
    NOT_PLACED = "not_placed"
    POISONED = "poisoned"


class Unfit(Exception):
    """The message is worth nothing with such a value."""

    def __init__(self, reason: Reason, field: str = "") -> None:
        super().__init__(f"{field}: {reason}")
        self.reason = reason
        self.field = field


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds."""

    low: float
    high: float
    # What takes the place of any other value; None when the message is worth nothing then.
    instead: float | None = None

    def reason(self, value: float) -> Reason | None:
        """What is wrong with a value."""
        if self.low <= value <= self.high:
            return None
        return Reason.OUT_OF_RANGE if math.isfinite(value) else Reason.NON_FINITE


@dataclass(frozen=True, slots=True)
class AnyReal:
    """Any double: NaN and infinity are what there is to report."""


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""


@dataclass(frozen=True, slots=True)
class Text:
    """For people to read; what is too long is cut."""

    max_chars: int
    # The end says more than the beginning.
    keeps_end: bool = False

    def cut(self, value: str) -> str:
        """As much of it as may pass."""
        return value[-self.max_chars :] if self.keeps_end else value[: self.max_chars]


@dataclass(frozen=True, slots=True)
class Name:
    """An identifier, or a word that becomes part of one."""

    pattern: re.Pattern[str]
    # What takes the place of any other value; None when the message is worth nothing then.
    instead: str | None = None
    reason: Reason = Reason.BAD_NAME


@dataclass(frozen=True, slots=True)
class Moment:
    """Seconds since the Unix epoch, by the clock of the node."""


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes that are passed on; what is too long is cut."""

    max_bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """A message inside of this one. One that is worth nothing makes this one worthless."""


@dataclass(frozen=True, slots=True)
class Many:
    """A repeated field: elements that are worth nothing, and those beyond `most`, are left out."""

    each: Part | Text | Number
    most: int


@dataclass(frozen=True, slots=True)
class Pairs:
    """A map: pairs that are worth nothing, and those beyond `most`, are left out."""

    keys: Text
    values: Text | Number | AnyReal
    most: int


Rule = Number | AnyReal | Flag | Text | Name | Moment | Data | Part | Many | Pairs


def plausible_time_s(at_s: float, now_s: float, offset_s: float = 0.0) -> float:
    """When something happened by the controller's clock, as well as that can be known.

    `offset_s` is how far the controller's clock is ahead of the node's. A clock that is
    off by a second or so is left as it is; nothing happens in the future or an age ago.
    """
    if not math.isfinite(at_s) or at_s <= 0.0:
        return now_s
    if abs(offset_s) > CLOCK_TOLERANCE_S:
        at_s += offset_s
    if at_s > now_s + CLOCK_TOLERANCE_S:
        return now_s
    return max(at_s, now_s - MAX_AGE_S)
