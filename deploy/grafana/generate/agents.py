"""The panels about agents and the controller itself, for the Fleet dashboard."""

from __future__ import annotations

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Panel

from deploy.grafana.generate.panels import Query, graph, rows


def controller() -> tuple[Builder[Panel], ...]:
    """The controller's own process."""
    return (
        rows(
            "Controller",
            "Its version, and the term in which it writes: one more with every start.",
            "max by (version) (outlast_build_info) * on () group_left () "
            "max(outlast_controller_term)",
        ),
        graph(
            "Clock",
            "How far the wall clock is ahead of the steady time in which things are noted.",
            "s",
            Query("max(outlast_controller_clock_offset_seconds)", "offset"),
        ),
    )


def kubernetes() -> tuple[Builder[Panel], ...]:
    """What the API server does for the controller."""
    return (
        graph(
            "Agent pods",
            "Pods of agents by phase, on Kubernetes.",
            "none",
            Query("sum by (phase) (outlast_kube_pods)", "{{phase}}"),
            stacked=True,
        ),
        graph(
            "Calls of the API server",
            "Operations on Kubernetes a second, by result.",
            "none",
            Query(
                "sum by (operation, result) "
                "(rate(outlast_kube_operations_total[$__rate_interval]))",
                "{{operation}} {{result}}",
            ),
        ),
    )


def agents() -> tuple[Builder[Panel], ...]:
    """Processes on nodes."""
    return (
        graph(
            "Agents connected",
            "Agents that have a session, as they say themselves, and sessions that were begun.",
            "none",
            Query("sum(outlast_agent_connected)", "connected"),
            Query(
                "sum(increase(outlast_agent_sessions_total[$__rate_interval]))", "sessions begun"
            ),
        ),
        graph(
            "Heartbeats",
            "Heartbeats that all agents send a second.",
            "none",
            Query("sum(rate(outlast_agent_heartbeats_total[$__rate_interval]))", "heartbeats"),
        ),
        graph(
            "Logs by OTLP",
            "Log records of agents and controller a second, exported, dropped or failed.",
            "none",
            Query(
                "sum by (outcome) (rate(outlast_otlp_records_total[$__rate_interval]))",
                "{{outcome}}",
            ),
        ),
        graph(
            "Errors of agents",
            "Background tasks of agents that failed and were restarted, by task; and standby "
            "processes that ended.",
            "none",
            Query("sum by (part) (outlast_agent_errors_total)", "{{part}}"),
            Query("sum(outlast_agent_standby_restarts_total)", "standby processes"),
        ),
    )
