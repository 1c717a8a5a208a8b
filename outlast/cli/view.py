"""The live view of a job, and the same as plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from outlast.cli import describe, describe_incident
from outlast.cli.follow import Follower, Snapshot
from outlast.durations import duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from outlast.v1.common_pb2 import StepReport
    from outlast.v1.incidents_pb2 import Incident
    from outlast.v1.jobs_pb2 import Job
    from outlast.v1.nodes_pb2 import Node

FRAME_S = 0.25
# Without a terminal a line is printed for each change and for every tenth of the run.
_PLAIN_SHARES = 10
_SPARK_WIDTH = 60
_MAX_INCIDENTS = 5
# In these a job waits for something, and its reason says for what.
_WAITING = ("QUEUED", "PROVISIONING", "REPAIRING", "RESTARTING", "PAUSED")
_SPARKS = "▁▂▃▄▅▆▇█"
_STATE_STYLES = {
    "RUNNING": "green",
    "SUCCEEDED": "bold green",
    "FAILED": "bold red",
    "CANCELLED": "yellow",
    "PAUSED": "yellow",
    "READY": "green",
    "STANDBY": "cyan",
    "ASSIGNED": "green",
    "SUSPECT": "yellow",
    "QUARANTINED": "red",
    "RETIRED": "red",
    "RELEASED": "dim",
}


def show(
    follower: Follower,
    *,
    notes: Sequence[str] = (),
    tick: Callable[[Snapshot], None] | None = None,
) -> Snapshot:
    """Show a job until it ends; returns the last snapshot.

    `tick` is called with every look; `notes` may grow meanwhile.
    """
    if sys.stdout.isatty():
        return _show_live(follower, notes, tick)
    return _show_plain(follower, notes, tick)


def sparkline(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """Values as a row of bars, averaged down to `width`."""
    if not values:
        return ""
    share = max(1.0, len(values) / width)
    cells = []
    for index in range(min(width, len(values))):
        part = values[int(index * share) : max(int((index + 1) * share), int(index * share) + 1)]
        cells.append(sum(part) / len(part))
    low, high = min(cells), max(cells)
    if not high > low:
        return _SPARKS[0] * len(cells)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round((cell - low) / (high - low) * top)] for cell in cells)


def render(snapshot: Snapshot, notes: Sequence[str], now_s: float) -> RenderableType:
    """A frame of the live view."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [_job_panel(snapshot, now_s)]
    if snapshot.nodes:
        parts.append(_node_table(snapshot.nodes, snapshot.num_nodes))
    if snapshot.incidents:
        parts.append(_incident_table(snapshot.incidents, now_s))
    parts += [Text(f"  {note}", style="magenta") for note in notes[-4:]]
    if snapshot.trouble:
        parts.append(Text(f"  {snapshot.trouble}", style="bold yellow"))
    return Group(*parts)


def plain_lines(before: Snapshot | None, now: Snapshot) -> list[str]:
    """What changed between two looks, as lines of a log."""
    lines = []
    job = now.job
    if before is None or _standing(before.job) != _standing(job):
        attempt = f" (attempt {job.attempt})" if job.attempt else ""
        lines.append(f"{job.state}{attempt}: {job.reason}")
    known = {} if before is None else {item.incident_id: item for item in before.incidents}
    for incident in now.incidents:
        lines += _incident_changes(known.get(incident.incident_id), incident)
    if before is None or _tenth(before) != _tenth(now):
        speed = f", {job.tokens_per_s:,.0f} tokens/s" if describe.is_training(job) else ""
        lines.append(f"{describe.progress(job)}{speed}")
    if now.trouble and (before is None or before.trouble != now.trouble):
        lines.append(now.trouble)
    return lines


def _standing(job: Job) -> tuple[str, int, str]:
    """What a line is due for. A job that works on says in many words what it does now."""
    return job.state, job.attempt, job.reason if job.state in _WAITING else ""


def _incident_changes(earlier: Incident | None, now: Incident) -> list[str]:
    lines = []
    what = now.cause.replace("_", " ")
    if now.is_note:
        if earlier is None:
            lines.append(f"note {now.incident_id}: {what}: {now.reason}")
        return lines
    if earlier is None:
        known = f": {what}" if now.cause not in ("", "unknown") else ""
        lines.append(f"incident {now.incident_id} opened{known}")
    if now.action and (earlier is None or not earlier.action):
        lines.append(f"incident {now.incident_id}: {what}: {now.reason}")
    if now.state == "CLOSED" and (earlier is None or earlier.state != "CLOSED"):
        lines.append(f"incident {now.incident_id} closed: {describe.cost(now)}")
    return lines


def _show_live(
    follower: Follower, notes: Sequence[str], tick: Callable[[Snapshot], None] | None
) -> Snapshot:
    from rich.live import Live

    def frame() -> RenderableType:
        return render(follower.snapshot(), notes, time.time())

    with Live(get_renderable=frame, refresh_per_second=1 / FRAME_S, transient=False) as live:
        last = _loop(follower, tick)
        live.refresh()
    return last


def _show_plain(
    follower: Follower, notes: Sequence[str], tick: Callable[[Snapshot], None] | None
) -> Snapshot:
    shown: Snapshot | None = None
    num_notes = 0

    def print_changes(snapshot: Snapshot) -> None:
        nonlocal shown, num_notes
        if tick is not None:
            tick(snapshot)
        lines = [*plain_lines(shown, snapshot), *notes[num_notes:]]
        num_notes = len(notes)
        for line in lines:
            print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
        shown = snapshot

    return _loop(follower, print_changes)


def _loop(follower: Follower, tick: Callable[[Snapshot], None] | None) -> Snapshot:
    while True:
        snapshot = follower.snapshot()
        if tick is not None:
            tick(snapshot)
        if snapshot.is_finished:
            return snapshot
        follower.wait(FRAME_S)


def _tenth(snapshot: Snapshot) -> int:
    job = snapshot.job
    # Of a script nobody knows how far it is.
    return 0 if describe.is_script(job) else _PLAIN_SHARES * job.step // job.total_steps


def _job_panel(snapshot: Snapshot, now_s: float) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    job = snapshot.job
    state = Text.assemble(
        (job.state, _STATE_STYLES.get(job.state, "bold yellow")),
        (f" for {duration(now_s - job.state_since_s)}", "dim"),
        f"   attempt {job.attempt}",
    )
    lines: list[RenderableType] = [
        state,
        Text(job.reason, style="dim", overflow="ellipsis", no_wrap=True),
        *([] if describe.is_script(job) else [_bar(job.step / job.total_steps)]),
        Text(
            f"{describe.progress(job)}   {describe.rate(job) if describe.is_training(job) else ''}"
        ),
        Text(f"{describe.checkpoint(job)}", style="dim"),
        Text(sparkline(_losses(snapshot.steps)), style="blue"),
    ]
    return Panel(Group(*lines), title=job.job_id, title_align="left", border_style="blue")


def _bar(share: float) -> RenderableType:
    from rich.text import Text

    done = min(_SPARK_WIDTH, max(0, round(share * _SPARK_WIDTH)))
    return Text.assemble(("━" * done, "green"), ("━" * (_SPARK_WIDTH - done), "bright_black"))


def _losses(reports: Sequence[StepReport]) -> list[float]:
    newest = {report.step: report.loss for report in reports if report.loss == report.loss}
    return [newest[step] for step in sorted(newest)]


def _node_table(nodes: Sequence[Node], num_nodes: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2), header_style="dim", expand=True)
    for name in ("node", "state", "connected", "job"):
        table.add_column(name, no_wrap=True)
    table.add_column("reason", no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    for node in nodes:
        table.add_row(
            node.node_id,
            Text(node.state, style=_STATE_STYLES.get(node.state, "yellow")),
            _connected(node),
            node.job_id or "-",
            node.reason,
        )
    if num_nodes > len(nodes):
        table.add_row(f"and {num_nodes - len(nodes):,} more", "", "", "", "")
    return table


def _connected(node: Node) -> Text:
    from rich.text import Text

    if not node.connected:
        return Text("no", style="red")
    return Text("silent", style="yellow") if node.late else Text("yes")


def _incident_table(incidents: Sequence[Incident], now_s: float) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), header_style="dim", expand=True)
    for name in ("incident", "state", "cause"):
        table.add_column(name, no_wrap=True)
    table.add_column("what was done", ratio=1)
    for incident in incidents[-_MAX_INCIDENTS:]:
        table.add_row(
            describe_incident.short_id(incident),
            incident.state,
            incident.cause.replace("_", " "),
            describe_incident.summary(incident, now_s),
        )
    return table
