"""`outlast trends`: what days and weeks of a job show."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outlast.cli import output
from outlast.cli.connect import controller_of, find_job
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import AnyJobName, Controller, Json, StateDir
from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.v1.trends_pb2 import JobTrends, NodeStatistics, Trend

_TREND_HEADER = ("TREND", "LEVEL", "A WEEK", "95 % INTERVAL", "COST SO FAR", "CERTAIN")
_NODE_HEADER = ("NODE", "SLOWEST", "WORK", "LAST TO ENTER", "IN SERVICE", "FAULTS", "CHECKS")


def trends(
    job: AnyJobName = "",
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Show how a job's MFU, periodic stalls and late launches have changed over days and weeks.

    And how each of its nodes compared with the others over the last week. A trend needs about a
    day of training in one layout.
    """
    with controller_of(controller, state_dir) as client:
        found = client.trends(find_job(client, job).job_id)
    if json:
        output.print_json(output.facts(found))
        return
    for line in found.findings:
        output.print_wrapped(f"! {line}")
    _print_trends(found)
    print()
    _print_stalls(found)
    print()
    now = "the job has no nodes that were compared yet"
    output.print_table(_NODE_HEADER, [_node_row(node) for node in found.nodes], empty=now)


def trend_rows(found: JobTrends) -> list[tuple[str, ...]]:
    """A row for each trend that there is."""
    rows = []
    if found.HasField("speed"):
        level = f"{found.speed.level:,.0f} tokens/s"
        if found.peak_flops_per_s > 0:
            mfu = found.speed.level * found.model_flops_per_token / found.peak_flops_per_s
            level = f"{mfu:.1%}"
        rows.append(_relative_row("MFU", level, found.speed))
    if found.HasField("speed_in_attempts"):
        rows.append(_relative_row("MFU within attempts", "", found.speed_in_attempts))
    if found.HasField("late_launches"):
        late = found.late_launches
        interval = f"{late.low:+.2%} to {late.high:+.2%}"
        level, change = f"{late.level:.2%} of a step", f"{late.per_week:+.2%}"
        rows.append(("late launches", level, change, interval, "", _certain(late)))
    return rows


def _print_trends(found: JobTrends) -> None:
    rows = trend_rows(found)
    if rows:
        output.print_table(_TREND_HEADER, rows, empty="")
    if found.why_no_trend:
        output.print_wrapped(f"no trend yet: {found.why_no_trend}")


def _relative_row(name: str, level: str, trend: Trend) -> tuple[str, ...]:
    base = trend.level or 1.0
    return (
        name,
        level,
        f"{trend.ratio_per_week:+.1%}",
        f"{trend.low / base:+.1%} to {trend.high / base:+.1%}",
        f"{trend.lost_ratio:.1%}" if trend.is_significant and trend.lost_ratio else "",
        _certain(trend),
    )


def _certain(trend: Trend) -> str:
    return f"p {trend.p_value:.1g}" if trend.is_significant else f"no (p {trend.p_value:.2f})"


def _print_stalls(found: JobTrends) -> None:
    if not found.stalls:
        print("no periodic stalls in the newest steps")
    now_s = time.time()
    for stall in found.stalls:
        ago = duration(max(0.0, now_s - stall.last_s))
        output.print_wrapped(f"periodic stall: {stall.description}, {ago} ago")


def _node_row(node: NodeStatistics) -> tuple[str, ...]:
    is_compared = node.num_windows > 0
    slowest = f"{node.slowest_ratio:.0%} (expected {node.expected_ratio:.0%})"
    checks = f"{node.num_checks - node.num_checks_failed} of {node.num_checks}"
    return (
        node.node_id + (" (slow)" if node.is_slow else ""),
        slowest if is_compared else "-",
        f"{node.work_ratio:.2f}x" if is_compared else "-",
        f"{node.last_ratio:.0%}" if is_compared else "-",
        duration(node.service_s),
        str(node.num_faults) + (f", {node.num_notes} noted" if node.num_notes else ""),
        f"{checks} passed" if node.num_checks else "-",
    )
