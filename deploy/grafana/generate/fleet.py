"""Fleet: is all well, and where is it not?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders

from deploy.grafana.generate.agents import agents, controller, kubernetes
from deploy.grafana.generate.panels import Query, board, graph, heading, number, rows


def dashboard() -> builders.Dashboard:
    """Jobs, nodes and the controller at a glance."""
    whole = board("outlast-fleet", "Fleet", "Every job and node, and the controller itself.")
    _now(whole)
    _jobs(whole)
    _nodes(whole)
    _service(whole)
    return whole


def _now(whole: builders.Dashboard) -> None:
    for panel in (
        number(
            "Jobs training",
            "Jobs in state RUNNING.",
            "none",
            'sum(outlast_job_state{state="RUNNING"})',
        ),
        number(
            "Jobs interrupted",
            "Jobs that have started and are not training: a fault is being answered, or they "
            "are being checked.",
            "none",
            "sum(job:outlast_job_interrupted:max)",
        ),
        number(
            "Nodes connected",
            "Nodes whose agent has a session with the controller.",
            "none",
            "sum(outlast_node_connected)",
        ),
        number(
            "Spare nodes", "Healthy nodes that no job uses.", "none", "max(outlast_spare_nodes)"
        ),
        number(
            "Mean time to recovery",
            "From a fault until every rank trains again, over the incidents of all jobs shown.",
            "s",
            "fleet:outlast_incident_recovery_seconds:mean",
        ),
        number(
            "Alerts firing",
            "Alerts of the rules that ship with Outlast.",
            "none",
            'count(ALERTS{alertstate="firing",alertname=~"Outlast.+"}) or vector(0)',
        ),
    ):
        whole.with_panel(panel)


def _jobs(whole: builders.Dashboard) -> None:
    whole.with_row(heading("Jobs"))
    for panel in (
        rows(
            "Jobs",
            "Every job that has not been over for an hour, and its state.",
            "max by (job_id, name, model, parallelism, state) ("
            "(outlast_job_state == 1) "
            "* on (job_id) group_left (name, model, parallelism) outlast_job_info)",
        ),
        graph(
            "Effective training time",
            "Seconds of progress in a second, over the last hour: what faults, redone steps and "
            "stalls leave of the time.",
            "percentunit",
            Query("job:outlast_goodput_seconds:rate1h", "{{job_id}}"),
        ),
        graph(
            "Speed",
            "Tokens per second of each job; zero while it does not train.",
            "none",
            Query("max by (job_id) (outlast_tokens_per_second)", "{{job_id}}"),
        ),
        graph(
            "Open incidents",
            "Incidents of each job that are not over.",
            "none",
            Query("max by (job_id) (outlast_incidents_open)", "{{job_id}}"),
        ),
    ):
        whole.with_panel(panel)


def _nodes(whole: builders.Dashboard) -> None:
    whole.with_row(heading("Nodes"))
    for panel in (
        graph(
            "Nodes by state",
            "Nodes in each state; retired ones are left out.",
            "none",
            Query("fleet_state:outlast_node_state:sum > 0", "{{state}}"),
            stacked=True,
        ),
        graph(
            "Nodes taken out and asked for",
            "Nodes that were evicted, and times that the cluster was asked for others.",
            "none",
            Query("sum(increase(outlast_node_evictions_total[$__rate_interval]))", "evicted"),
            Query("sum(increase(outlast_node_requests_total[$__rate_interval]))", "asked for"),
        ),
        rows(
            "Verdicts of checks",
            "Findings by test and verdict since the controller began.",
            "sum by (test, verdict) (outlast_diagnostic_findings_total)",
        ),
        rows(
            "XIDs of GPUs",
            "Errors that GPUs reported, by node and number.",
            "sum by (node, gpu, xid) (outlast_gpu_xid_events_total)",
        ),
    ):
        whole.with_panel(panel)


def _service(whole: builders.Dashboard) -> None:
    whole.with_row(heading("Controller and agents"))
    commits = "sum by (le) (rate(outlast_journal_commit_seconds_bucket[$__rate_interval]))"
    for panel in (
        graph(
            "Journal commits",
            "Time to make a batch of facts durable. Every decision waits for one.",
            "s",
            Query(f"histogram_quantile(0.5, {commits})", "half of them"),
            Query(f"histogram_quantile(0.99, {commits})", "99 of 100"),
        ),
        graph(
            "Events that wait or were dropped",
            "Events that agents keep for the controller, and those that found no room.",
            "none",
            Query("sum(outlast_agent_events_buffered)", "waiting"),
            Query("sum(outlast_agent_events_dropped_total)", "dropped"),
        ),
        *controller(),
        *agents(),
        *kubernetes(),
    ):
        whole.with_panel(panel)
