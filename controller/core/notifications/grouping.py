"""Which events make one message to a receiver, and when it is due.

A fault that recovers within `wait_s` gives one message, with its recovery, and further ones of the
same job within `repeat_s` are collected into one message. A fault that lasts longer is due after
`wait_s`. The end of a job, and the recovery from a fault that was already sent, are due at once.
What stops no job, such as a note of a detector, has no recovery: it is due after `wait_s`, and
collected within `repeat_s` of any message about an incident.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from controller.core.notifications.job_events import EventKind, JobEvent
from outlast.ids import JobId

# Older events are dropped: a controller or a receiver may have been away for days.
MAX_AGE_S = 86_400.0

# A detector that only logs may do so often, and nothing has to be done at once.
DEFAULT_KINDS = frozenset(EventKind) - {EventKind.NOTE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which events go to one receiver, and how they are grouped."""

    kinds: frozenset[EventKind] = DEFAULT_KINDS
    jobs: tuple[str, ...] = ("*",)
    """Shell patterns of job ids."""
    wait_s: float = 30.0
    """How long a fault must last to be sent before its recovery."""
    repeat_s: float = 600.0
    """Further faults of a job that recover within `wait_s`, and what stops no job, are collected
    for so long."""

    def matches(self, event: JobEvent) -> bool:
        """Whether the event goes to this receiver."""
        return event.kind in self.kinds and any(
            fnmatchcase(event.job, pattern) for pattern in self.jobs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Events of one job that are sent together, oldest first."""

    job: JobId
    events: tuple[JobEvent, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(event.key for event in self.events)

    @property
    def newest(self) -> JobEvent:
        return self.events[-1]


def due(
    events: Iterable[JobEvent], sent: Mapping[str, float], route: Route, now_s: float
) -> tuple[Message, ...]:
    """The messages that are due to one receiver.

    `events` as `job_events` returns them; `sent` has the times of those that were sent, by key.
    """
    messages: list[Message] = []
    for job, group in groupby(events, key=lambda event: event.job):
        of_job = list(group)
        pending = [e for e in of_job if e.key not in sent and route.matches(e)]
        if pending and _due_s(of_job, pending, sent, route) <= now_s:
            messages.append(Message(job=job, events=tuple(pending)))
    return tuple(messages)


def _due_s(
    of_job: list[JobEvent], pending: list[JobEvent], sent: Mapping[str, float], route: Route
) -> float:
    """When the pending events of a job are due, all in one message."""
    if any(_is_urgent(event, sent) for event in pending):
        return 0.0
    recovered = {event.incident for event in of_job if event.kind is EventKind.RECOVERY}
    beside = [event.at_s + route.wait_s for event in pending if not event.stops_job]
    stopped = [event for event in pending if event.stops_job]
    lasting = [event.at_s + route.wait_s for event in stopped if event.incident not in recovered]
    over = [event.at_s for event in stopped if event.incident in recovered]
    sent_incidents = [event for event in of_job if event.is_of_incident and event.key in sent]
    # Of a fault a person hears no later because a note was sent before it.
    sent_faults = [event for event in sent_incidents if event.stops_job]
    beside = _collected(beside, sent_incidents, sent, route)
    return min(lasting + beside + _collected(over, sent_faults, sent, route))


def _collected(
    due_s: list[float], after: list[JobEvent], sent: Mapping[str, float], route: Route
) -> list[float]:
    """The first of these times, but not within `repeat_s` of what was sent."""
    if not due_s:
        return []
    last_s = max((sent[event.key] for event in after), default=None)
    first_s = min(due_s)
    return [first_s if last_s is None else max(first_s, last_s + route.repeat_s)]


def _is_urgent(event: JobEvent, sent: Mapping[str, float]) -> bool:
    if event.kind is EventKind.RECOVERY:
        return f"{EventKind.INCIDENT}/{event.incident}" in sent
    return not event.is_of_incident
