"""Recovery: what broke, how fast was it mended, and what did it cost?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders

from deploy.grafana.generate.panels import Query, board, choice, graph, heading, number, rows

_JOBS = 'job_id=~"$job_id"'


def dashboard() -> builders.Dashboard:
    """Incidents of one or all jobs."""
    whole = board(
        "outlast-recovery", "Recovery", "Incidents: causes, and the time that each part took."
    )
    whole.with_variable(
        choice("job_id", "Job", "label_values(outlast_job_info, job_id)", many=True)
    )
    _now(whole)
    _times(whole)
    _costs(whole)
    return whole


def _now(whole: builders.Dashboard) -> None:
    for panel in (
        number(
            "Incidents over",
            "Incidents that are closed.",
            "none",
            f"sum(outlast_incidents_total{{{_JOBS}}})",
        ),
        number(
            "Incidents open",
            "Incidents that are not over.",
            "none",
            f"sum(outlast_incidents_open{{{_JOBS}}})",
        ),
        number(
            "Restarts",
            "Starts after the first, of all jobs.",
            "none",
            f"sum(outlast_restarts_total{{{_JOBS}}})",
        ),
        number(
            "Time lost",
            "Time in which jobs stood still or repeated steps.",
            "s",
            f"sum(outlast_lost_seconds_total{{{_JOBS}}})",
        ),
        number(
            "Steps redone",
            "Steps that were trained a second time, since the controller began.",
            "none",
            f"sum(outlast_redone_steps_total{{{_JOBS}}})",
        ),
        number(
            "Mean time to recovery",
            "From a fault until every rank trains again.",
            "s",
            f"sum(outlast_incident_recovery_seconds_sum{{{_JOBS}}}) / "
            f"sum(outlast_incident_recovery_seconds_count{{{_JOBS}}})",
        ),
    ):
        whole.with_panel(panel)


def _times(whole: builders.Dashboard) -> None:
    whole.with_row(heading("How fast"))
    for part, description in (
        ("detection", "From the fault until it was noticed, half of the incidents of a cause."),
        ("diagnosis", "From there until it was decided what to do, half of the incidents."),
        ("recovery", "From the fault until every rank trains again, half of the incidents."),
    ):
        buckets = f"sum by (cause, le) (outlast_incident_{part}_seconds_bucket{{{_JOBS}}})"
        query = Query(f"histogram_quantile(0.5, {buckets})", "{{cause}}")
        whole.with_panel(graph(f"Time to {part}", description, "s", query))
    whole.with_panel(
        graph(
            "Open incidents",
            "Incidents of each job that are not over.",
            "none",
            Query(f"max by (job_id) (outlast_incidents_open{{{_JOBS}}})", "{{job_id}}"),
        )
    )


def _costs(whole: builders.Dashboard) -> None:
    whole.with_row(heading("What it cost"))
    for panel in (
        graph(
            "Time lost by cause",
            "Time in which jobs stood still or repeated steps, added up.",
            "s",
            Query(f"sum by (cause) (outlast_lost_seconds_total{{{_JOBS}}})", "{{cause}}"),
            stacked=True,
        ),
        graph(
            "Share of time lost by cause",
            "Lost seconds in a second, over the last hour.",
            "percentunit",
            Query(
                f"sum by (cause) (job_cause:outlast_lost_seconds:rate1h{{{_JOBS}}})", "{{cause}}"
            ),
            stacked=True,
        ),
        graph(
            "Time of incidents by state of the job",
            "Time that jobs spent in each state until the incident was closed, added up.",
            "s",
            Query(f"sum by (phase) (outlast_incident_phase_seconds_total{{{_JOBS}}})", "{{phase}}"),
            stacked=True,
        ),
        rows(
            "Incidents by cause and answer",
            "Incidents that are over.",
            f"sum by (job_id, cause, action) (outlast_incidents_total{{{_JOBS}}})",
        ),
    ):
        whole.with_panel(panel)
