"""Trends: what has changed over days and weeks, and what does it cost?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Panel

from deploy.grafana.generate.panels import Query, board, choice, graph, heading, rows

_JOBS = 'job_id=~"$job_id"'


def dashboard() -> builders.Dashboard:
    """Weeks of one or all jobs, and of nodes."""
    whole = board(
        "outlast-trends", "Trends", "Days and weeks: MFU, periodic stalls, late launches, nodes."
    )
    whole.with_variable(
        choice("job_id", "Job", "label_values(outlast_job_info, job_id)", many=True)
    )
    whole.time("now-14d", "now")
    for title, panels in (
        ("Jobs", (*_speed(), *_stalls())),
        ("Time", _time()),
        ("Nodes", _nodes()),
    ):
        whole.with_row(heading(title))
        for panel in panels:
            whole.with_panel(panel)
    return whole


def _speed() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "MFU",
            "Model FLOPs utilization, windows counted as windows.",
            "percentunit",
            Query(
                "max by (job_id) (outlast_model_flops_utilization_ratio"
                f'{{{_JOBS},convention="windowed"}})',
                "{{job_id}}",
            ),
        ),
        graph(
            "Change of MFU a week",
            "Slope over up to two weeks of one layout, as a share of MFU; zero while it is no more "
            "than chance. Within attempts: what a restart would end.",
            "percentunit",
            Query(
                f'max by (job_id) (outlast_job_mfu_trend_ratio{{{_JOBS},scope="job"}})',
                "{{job_id}}",
            ),
            Query(
                f'max by (job_id) (outlast_job_mfu_trend_ratio{{{_JOBS},scope="attempts"}})',
                "{{job_id}} within attempts",
            ),
        ),
    )


def _stalls() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "Periodic stalls",
            "Share of the time of the newest steps that goes into steps that are slow at a regular "
            "period, by the setting that has the same. `outlast trends` shows the periods.",
            "percentunit",
            Query(
                f"max by (job_id, setting) (outlast_job_periodic_stall_ratio{{{_JOBS}}})",
                "{{job_id}} {{setting}}",
            ),
            stacked=True,
        ),
        graph(
            "Late launches",
            "Share of a step for which a rank waits for replicas that enter an operation late; and "
            "how it changes a week.",
            "percentunit",
            Query(f"max by (job_id) (outlast_job_late_launch_ratio{{{_JOBS}}})", "{{job_id}}"),
            Query(
                f"max by (job_id) (outlast_job_late_launch_trend_ratio{{{_JOBS}}})",
                "{{job_id}} a week",
            ),
        ),
    )


def _time() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "ETTR",
            "Productive share of a job's whole time, and of its last hour.",
            "percentunit",
            Query(f"max by (job_id) (outlast_job_ettr_ratio{{{_JOBS}}})", "{{job_id}}"),
            Query(
                f"max by (job_id) (outlast_job_ettr_hour_ratio{{{_JOBS}}})",
                "{{job_id}} last hour",
            ),
        ),
        graph(
            "Where the time went",
            "Time since each job was submitted, by what it went into.",
            "s",
            Query(f"sum by (part) (outlast_job_part_seconds{{{_JOBS}}})", "{{part}}"),
            stacked=True,
        ),
    )


def _nodes() -> tuple[Builder[Panel], ...]:
    return (
        rows(
            "Nodes that are often the slowest",
            "Share of windows of the last week in which a node's ranks worked longest among the "
            "nodes of their job; the ten with most.",
            "topk(10, max by (node) (outlast_node_slowest_ratio))",
            unit="percentunit",
        ),
        rows(
            "Nodes that are often the last to enter",
            "Share of operations with replicas, of the last week, that one of a node's ranks was "
            "the last to enter; the ten with most.",
            "topk(10, max by (node) (outlast_node_last_to_enter_ratio))",
            unit="percentunit",
        ),
        rows(
            "Quarantines",
            "How often each node was quarantined of late.",
            "max by (node) (outlast_node_quarantines)",
        ),
        rows(
            "Diagnostics that were run",
            "Suites that nodes have run, by verdict, since the controller began.",
            "sum by (suite, verdict) (outlast_diagnostic_runs_total)",
        ),
        graph(
            "How long checks take",
            "Half of the runs of each test are shorter.",
            "s",
            Query(
                "histogram_quantile(0.5, "
                "sum by (test, le) (outlast_diagnostic_duration_seconds_bucket))",
                "{{test}}",
            ),
        ),
    )
