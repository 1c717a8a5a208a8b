"""Title and text of a message, from templates that a receiver may change."""

from __future__ import annotations

import time
from string import Template

from controller.core.notifications.grouping import Message
from controller.core.notifications.job_events import EventKind, JobEvent
from outlast.durations import duration

TITLE = "$job: $headline"
TEXT = "$lines\n$link"
FIELDS = {
    "job": "the job's id",
    "event": "incident, note, recovery, paused, failure or completion: the newest of them",
    "headline": "the newest event, in a few words",
    "reason": "why, as the controller decided it",
    "cause": "of an incident, such as node_lost",
    "action": "what was done about it, such as replace_nodes",
    "nodes": "nodes that are to blame",
    "incident": "the incident's id",
    "step": "last step before a fault, if known; last step of all of a job that has ended",
    "lost": "of a recovery: how long the job stood still or repeated steps",
    "lines": "every event, one a line",
    "link": "the job in the web page, if `notify.page` says where that is",
    "count": "how many events the message has",
}
"""What a template may use, with what it stands for."""


def title(message: Message, template: str, page: str) -> str:
    """One line."""
    return " ".join(Template(template).substitute(_values(message, page)).split())


def text(message: Message, template: str, page: str) -> str:
    """The body of the message."""
    return Template(template).substitute(_values(message, page)).strip()


def link(message: Message, page: str) -> str:
    """The job in the web page; "" if nobody said where that is."""
    return f"{page}/jobs/{message.job}" if page else ""


def _values(message: Message, page: str) -> dict[str, str]:
    last = message.newest
    return {
        "job": message.job,
        "event": str(last.kind),
        "headline": headline(last),
        "reason": last.reason,
        "cause": last.cause,
        "action": last.action,
        "nodes": ", ".join(last.nodes),
        "incident": last.incident,
        "step": "" if last.step is None else str(last.step),
        "lost": "" if last.lost_s is None else duration(last.lost_s),
        "lines": "\n".join(line(event) for event in message.events),
        "link": link(message, page),
        "count": str(len(message.events)),
    }


def headline(event: JobEvent) -> str:
    """What happened, in a few words."""
    cause = event.cause.replace("_", " ") or "unknown"
    match event.kind:
        case EventKind.INCIDENT:
            return f"{cause}{_after(event.step)}{'' if event.stops_job else ', the job goes on'}"
        case EventKind.NOTE:
            return f"note: {cause}, nothing was stopped"
        case EventKind.RECOVERY:
            lost = "" if event.lost_s is None else f", {duration(event.lost_s)} lost"
            return f"trains again after {cause}{lost}"
        case EventKind.PAUSED:
            return "paused, and waits for you"
        case EventKind.FAILURE:
            return f"failed{_after(event.step)}"
        case EventKind.COMPLETION:
            return f"completed all {event.step} steps"


def _after(step: int | None) -> str:
    return "" if step is None else f" after step {step}"


def line(event: JobEvent) -> str:
    """Its time (UTC), what happened, where and why."""
    at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(event.at_s))
    where = f" on {', '.join(event.nodes)}" if event.nodes else ""
    why = f": {event.reason}" if event.reason else ""
    return f"{at} {headline(event)}{where}{why}"
