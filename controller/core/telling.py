"""Which notices make a message to one receiver, and when.

A fault that is over before `wait_s` has passed is told once, as a recovery; further faults of a
job within `repeat_s` wait, and are told together. What ends a job, and the recovery from a fault
that was told, is told at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from controller.core.notices import Notice, NoticeKind
from outlast.ids import JobId

# Older news are not told any more: a controller or a receiver may have been away for days.
HORIZON_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What one receiver wants to be told."""

    events: frozenset[NoticeKind] = frozenset(NoticeKind)
    jobs: tuple[str, ...] = ("*",)
    """Patterns of jobs' ids, as a shell has them."""
    wait_s: float = 30.0
    """How long a fault must last to be told before it is over."""
    repeat_s: float = 600.0
    """Further faults of a job are told together, once in that time."""

    def has(self, notice: Notice) -> bool:
        """Whether this is one of them."""
        return notice.kind in self.events and any(
            fnmatchcase(notice.job, pattern) for pattern in self.jobs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is told of a job at once, oldest first."""

    job: JobId
    notices: tuple[Notice, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(notice.key for notice in self.notices)

    @property
    def last(self) -> Notice:
        """What stands now."""
        return self.notices[-1]


def due(
    found: Iterable[Notice], told: Mapping[str, float], wishes: Wishes, now_s: float
) -> tuple[Message, ...]:
    """What one receiver should be told of what happened.

    `told` has when what was told already, by the key of its notice. Of a fault that was told
    together with its end, both are there.
    """
    messages: list[Message] = []
    wanted = (each for each in found if wishes.has(each))
    for job, group in groupby(wanted, key=lambda each: each.job):
        mine = list(group)
        pending = [each for each in mine if each.key not in told]
        if pending and _tell_at(mine, pending, told, wishes) <= now_s:
            messages.append(Message(job=job, notices=tuple(pending)))
    return tuple(messages)


def _tell_at(
    mine: list[Notice], pending: list[Notice], told: Mapping[str, float], wishes: Wishes
) -> float:
    """When this job's pending notices are told, all of them together."""
    if any(_is_urgent(each, told) for each in pending):
        return 0.0
    over = {each.incident for each in mine if each.kind is NoticeKind.RECOVERY}
    # A fault is told once it has lasted, its recovery when that is there.
    at_s = min(
        each.at_s + (wishes.wait_s if each.incident not in over else 0.0) for each in pending
    )
    told_s = [told[each.key] for each in mine if each.is_of_incident and each.key in told]
    return max(at_s, max(told_s) + wishes.repeat_s) if told_s else at_s


def _is_urgent(notice: Notice, told: Mapping[str, float]) -> bool:
    if notice.kind is NoticeKind.RECOVERY:
        return f"{NoticeKind.INCIDENT}/{notice.incident}" in told
    return not notice.is_of_incident
