"""Every second of a job, accounted for: exactly one of eight parts.

An account is a running sum beside the job's record: each transition closes the span of
one part and begins that of another, so the parts add up to the time since the job was
submitted, whatever happened. One correction is made afterwards: the span between a fault
and its detection was believed to be productive until the incident was opened, and becomes
`detect` then. A step that is lost was productive when it was first trained; the seconds in
which it is trained again are `redo`.

What a single incident cost, by the same parts, is in `cost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from controller.core.frozen import replace
from controller.core.states import TERMINAL, JobState

# Sliding ETTR looks back this far (ByteRobust, SOSP '25, plots the same window).
WINDOW_S = 3600.0
# Stalls by checkpoints are noted once they add up to this: each note takes two spans.
LEAST_STALL_S = 1.0
# A job that changes its part more often than this in an hour has a shorter memory.
MAX_RECENT = 128


class Part(StrEnum):
    """What a second of a job was spent on."""

    PRODUCTIVE = "productive"  # steps trained for the first time
    # Training waits for a checkpoint's first stage, or the finished job for its last upload.
    CHECKPOINT = "checkpoint"
    DETECT = "detect"  # from a fault until it is noticed
    DIAGNOSE = "diagnose"  # workers are stopped, evidence gathered, nodes checked
    PROVISION = "provision"  # waiting for nodes and for their checks
    RESTORE = "restore"  # processes start, groups form, state is loaded
    REDO = "redo"  # steps trained again after a fault
    PAUSED = "paused"


PARTS = tuple(Part)
_TRAINING = (Part.PRODUCTIVE, Part.REDO)
_PART_OF_STATE = {
    JobState.QUEUED: Part.PROVISION,
    JobState.PROVISIONING: Part.PROVISION,
    JobState.PREFLIGHT: Part.PROVISION,
    JobState.STARTING: Part.RESTORE,
    JobState.RUNNING: Part.PRODUCTIVE,
    JobState.SUSPENDING: Part.DIAGNOSE,
    JobState.DIAGNOSING: Part.DIAGNOSE,
    JobState.REPAIRING: Part.PROVISION,
    JobState.RESTARTING: Part.RESTORE,
    JobState.PAUSED: Part.PAUSED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of the job's time, from then until the next span begins."""

    part: Part
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Seconds by part up to the last change, and the spans of about the last hour.

    Without spans nothing has been accounted for yet: a job of an older journal.
    """

    # In the order of `PARTS`.
    seconds: tuple[float, ...] = (0.0,) * len(PARTS)
    # The newest is the present one, and not in `seconds` yet.
    recent: tuple[Span, ...] = ()
    ended_s: float | None = None

    @property
    def part(self) -> Part | None:
        """What the present second counts as; None before the first and after the last."""
        return self.recent[-1].part if self.recent and self.ended_s is None else None


NOTHING_YET = Account()


def opened(now_s: float) -> Account:
    """The account of a job that was just submitted."""
    return Account(recent=(Span(part=Part.PROVISION, since_s=now_s),))


def part_of(
    state: JobState, *, is_redoing: bool, is_for_user: bool, is_growing: bool = False
) -> Part | None:
    """What a job in this state spends its time on; None once it has ended.

    `is_redoing` while it trains steps again that it had trained before a fault;
    `is_for_user` while workers are stopped because a person asked for it; `is_growing` while
    they are in order to go on with more of them.
    """
    if state in TERMINAL:
        return None
    if state is JobState.RUNNING and is_redoing:
        return Part.REDO
    if state is JobState.SUSPENDING and is_for_user:
        return Part.PAUSED
    if state is JobState.SUSPENDING and is_growing:
        return Part.RESTORE
    return _PART_OF_STATE[state]


def moved(account: Account, part: Part | None, now_s: float) -> Account:
    """From now on the job's time counts as `part`; None ends the account."""
    if account.ended_s is not None or part is account.part:
        return account
    if not account.recent:
        return opened_as(part, now_s)
    present = account.recent[-1]
    now_s = max(now_s, present.since_s)
    counted = replace(
        account, seconds=_added(account.seconds, present.part, now_s - present.since_s)
    )
    if part is None:
        return replace(counted, ended_s=now_s)
    spans = (*_within(account.recent, now_s - WINDOW_S), Span(part=part, since_s=now_s))
    return replace(counted, recent=spans[-MAX_RECENT:])


def opened_as(part: Part | None, now_s: float) -> Account:
    """An account that begins now, in the middle of a job."""
    return NOTHING_YET if part is None else Account(recent=(Span(part=part, since_s=now_s),))


def blamed(account: Account, fault_s: float, now_s: float) -> Account:
    """A fault of `fault_s` was noticed now: training since then was none.

    Only the present span is corrected, and only while it is one of training.
    """
    if account.part not in _TRAINING:
        return account
    since_s = account.recent[-1].since_s
    return moved(account, Part.DETECT, min(max(fault_s, since_s), now_s))


def stalled(account: Account, more_s: float, now_s: float) -> Account:
    """Training waited so long for checkpoints since it was last said, in short pieces.

    They count as one, which ends now. Only the present span is corrected, and only while it
    is one of training.
    """
    part = account.part
    if part not in _TRAINING:
        return account
    since_s = max(account.recent[-1].since_s, now_s - more_s)
    return moved(moved(account, Part.CHECKPOINT, since_s), part, now_s)


def totals(account: Account, now_s: float) -> dict[Part, float]:
    """Seconds by part until now. They sum to the job's wall time."""
    seconds = account.seconds
    if account.recent and account.ended_s is None:
        present = account.recent[-1]
        seconds = _added(seconds, present.part, max(0.0, now_s - present.since_s))
    return dict(zip(PARTS, seconds, strict=True))


def ettr(parts: Mapping[Part, float]) -> float | None:
    """Effective training time ratio: productive seconds over all; None before the first."""
    wall_s = sum(parts.values())
    return parts[Part.PRODUCTIVE] / wall_s if wall_s > 0 else None


def window(account: Account, now_s: float, window_s: float = WINDOW_S) -> dict[Part, float]:
    """Seconds by part within the last hour, or since the account began if that is later."""
    end_s = now_s if account.ended_s is None else min(now_s, account.ended_s)
    begin_s = end_s - window_s
    parts = dict.fromkeys(PARTS, 0.0)
    ends = [span.since_s for span in account.recent[1:]] + [end_s]
    for span, until_s in zip(account.recent, ends, strict=False):
        parts[span.part] += max(0.0, min(until_s, end_s) - max(span.since_s, begin_s))
    return parts


def _within(spans: tuple[Span, ...], begin_s: float) -> tuple[Span, ...]:
    """The spans that reach beyond `begin_s`."""
    first = max((i for i, span in enumerate(spans) if span.since_s <= begin_s), default=0)
    return spans[first:]


def _added(seconds: tuple[float, ...], part: Part, more_s: float) -> tuple[float, ...]:
    index = PARTS.index(part)
    return (*seconds[:index], seconds[index] + more_s, *seconds[index + 1 :])
