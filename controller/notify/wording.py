"""Notices in words: title and text of a message, from templates that a receiver may change."""

from __future__ import annotations

import time
from string import Template

from controller.core.notices import Notice, NoticeKind
from controller.core.telling import Message
from outlast.durations import duration

TITLE = "$job: $headline"
TEXT = "$lines\n$link"
FIELDS = {
    "job": "the job's id",
    "event": "incident, recovery, paused, failure or completion: the newest of them",
    "headline": "what stands now, in a few words",
    "reason": "why, as the controller decided it",
    "cause": "of an incident, such as node_lost",
    "action": "what was done about it, such as replace_nodes",
    "nodes": "nodes that are to blame",
    "incident": "the incident's id",
    "step": "last step before a fault; last step of all of a job that has ended",
    "lost": "of a recovery: how long the job stood still or repeated steps",
    "lines": "everything that is told, a line each",
    "link": "the job in the web page, if `notify.page` says where that is",
    "count": "how many events are told at once",
}
"""What a template may use, with what it stands for."""


def title(message: Message, template: str, page: str) -> str:
    """One line."""
    return " ".join(Template(template).substitute(_values(message, page)).split())


def text(message: Message, template: str, page: str) -> str:
    """All that there is to say."""
    return Template(template).substitute(_values(message, page)).strip()


def link(message: Message, page: str) -> str:
    """The job in the web page; "" if nobody said where that is."""
    return f"{page}/jobs/{message.job}" if page else ""


def _values(message: Message, page: str) -> dict[str, str]:
    last = message.last
    return {
        "job": message.job,
        "event": str(last.kind),
        "headline": headline(last),
        "reason": last.reason,
        "cause": last.cause,
        "action": last.action,
        "nodes": ", ".join(last.nodes),
        "incident": last.incident,
        "step": str(last.step),
        "lost": "" if last.lost_s is None else duration(last.lost_s),
        "lines": "\n".join(line(notice) for notice in message.notices),
        "link": link(message, page),
        "count": str(len(message.notices)),
    }


def headline(notice: Notice) -> str:
    """What happened, in a few words."""
    cause = notice.cause.replace("_", " ") or "unknown"
    match notice.kind:
        case NoticeKind.INCIDENT:
            return f"{cause} after step {notice.step}"
        case NoticeKind.RECOVERY:
            lost = "" if notice.lost_s is None else f", {duration(notice.lost_s)} lost"
            return f"trains again after {cause}{lost}"
        case NoticeKind.PAUSED:
            return "paused, and waits for you"
        case NoticeKind.FAILURE:
            return f"failed after step {notice.step}"
        case NoticeKind.COMPLETION:
            return f"completed all {notice.step} steps"


def line(notice: Notice) -> str:
    """Its time (UTC), what happened, where and why."""
    at = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(notice.at_s))
    where = f" on {', '.join(notice.nodes)}" if notice.nodes else ""
    why = f": {notice.reason}" if notice.reason else ""
    return f"{at} {headline(notice)}{where}{why}"
