"""A job's account as one self-contained web page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from outlast.cli import account, describe
from outlast.cli.pages import charts, shell
from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job


def render(job: Job, incidents: Sequence[Incident]) -> str:
    """The page of a job and its incidents."""
    parts = dict(account.shown_parts(job))
    wall_s = sum(parts.values())
    return shell.page(
        title=f"{job.name}: where its time went",
        subtitle=f"{job.job_id} · {job.state} · {duration(wall_s)} since it was submitted",
        outcome=f"It trained for {100 * job.ettr:.2f} % of the time. {job.reason}",
        is_good=job.state != "FAILED",
        figures=[
            ("ETTR", f"{100 * job.ettr:.2f} %"),
            ("ETTR, last hour", f"{100 * job.ettr_last_hour:.2f} %"),
            ("incidents", str(len(incidents))),
            ("steps lost", str(account.steps_lost(incidents))),
        ],
        body=[
            *_time(parts, wall_s),
            *_marks(job),
            *_causes(incidents),
            *_each(incidents),
        ],
    )


def _time(parts: dict[str, float], wall_s: float) -> list[str]:
    rows = [
        (part, f"{100 * seconds / (wall_s or 1.0):.2f} %", duration(seconds))
        for part, seconds in parts.items()
    ]
    return [
        shell.heading("Every second of the job"),
        charts.parts_bar(parts),
        charts.parts_key(parts),
        shell.table(("Part", "Share", "Time"), rows, numbers=2),
    ]


def _marks(job: Job) -> list[str]:
    """Marks of the curve: where people let it go on, and what the run was not trained on."""
    chosen = [shell.paragraph(text) for _, text in describe.chosen(job)]
    left_out = [shell.paragraph(text) for _, text in describe.left_out(job)]
    return [
        *([shell.heading("Where training was begun by choice"), *chosen] if chosen else []),
        *([shell.heading("What was left out"), *left_out] if left_out else []),
    ]


def _causes(incidents: Sequence[Incident]) -> list[str]:
    return [
        shell.heading("What faults cost, by cause"),
        shell.table(
            ("Cause", "Incidents", "MTTR", "Lost"), account.cause_rows(incidents), numbers=3
        ),
    ]


def _each(incidents: Sequence[Incident]) -> list[str]:
    """One bar for each incident that stopped training."""
    found = [shell.heading("Incidents")] if incidents else []
    for item in incidents:
        cause = item.cause.replace("_", " ")
        found.append(f"<h3>{escape(item.incident_id)}: {escape(cause)}</h3>")
        found.append(shell.paragraph(item.reason))
        if item.seconds:
            found.append(charts.parts_bar(item.seconds))
        found.append(shell.paragraph(describe.cost(item)))
    return found
