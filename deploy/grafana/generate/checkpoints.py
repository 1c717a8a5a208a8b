"""Checkpoints: how much would be lost now, and what do they cost?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Panel

from deploy.grafana.generate.panels import Query, board, choice, graph, heading, number

_JOBS = 'job_id=~"$job_id"'


def dashboard() -> builders.Dashboard:
    """Both stages of checkpoints of one or all jobs."""
    whole = board(
        "outlast-checkpoints",
        "Checkpoints",
        "Checkpoints in host memory and in storage: age, stall, time, size, failures.",
    )
    whole.with_variable(
        choice("job_id", "Job", "label_values(outlast_job_info, job_id)", many=True)
    )
    _now(whole)
    _storage(whole)
    _memory(whole)
    return whole


def _now(whole: builders.Dashboard) -> None:
    for panel in (
        number(
            "Steps not in storage",
            "Steps since the newest stored checkpoint, of the job that has most of them. The loss "
            "of a node costs these.",
            "none",
            f"max(job:outlast_checkpoint_lag_steps:max{{{_JOBS}}})",
        ),
        number(
            "Age",
            "Time since a checkpoint was stored last, of the job that waits longest.",
            "s",
            f"time() - min(outlast_checkpoint_last_success_timestamp_seconds{{{_JOBS}}})",
        ),
        number(
            "Size",
            "Size of the newest stored checkpoint.",
            "bytes",
            f"max(outlast_checkpoint_size_bytes{{{_JOBS}}})",
        ),
        number(
            "Stored",
            "Bytes of all checkpoints stored since the controller began.",
            "bytes",
            f"sum(outlast_checkpoint_bytes_total{{{_JOBS}}})",
        ),
        number(
            "Failures",
            "Checkpoints that could not be stored, and old ones that could not be removed.",
            "none",
            f"sum(outlast_checkpoint_failures_total{{{_JOBS}}})",
        ),
        number(
            "Host memory",
            "Memory that checkpoints take on all nodes.",
            "bytes",
            "sum(outlast_agent_host_memory_bytes)",
        ),
    ):
        whole.with_panel(panel)


def _storage(whole: builders.Dashboard) -> None:
    whole.with_row(heading("Storage"))
    for panel in (*_what_is_stored(), *_uploads()):
        whole.with_panel(panel)


def _what_is_stored() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "Steps not in storage",
            "Steps since the newest stored checkpoint, and the interval that the spec asks for.",
            "none",
            Query(f"job:outlast_checkpoint_lag_steps:max{{{_JOBS}}}", "{{job_id}}"),
            Query(
                f"max by (job_id) (outlast_checkpoint_interval_steps{{{_JOBS}}})",
                "{{job_id}} interval",
            ),
        ),
        graph(
            "Newest step in storage",
            "The step that the loss of a node goes back to.",
            "none",
            Query(f"max by (job_id) (outlast_checkpoint_committed_step{{{_JOBS}}})", "{{job_id}}"),
        ),
    )


def _uploads() -> tuple[Builder[Panel], ...]:
    buckets = f"sum by (le, stage) (outlast_checkpoint_stage_duration_seconds_bucket{{{_JOBS}}})"
    return (
        graph(
            "Time to store",
            "Half of all checkpoints since the controller began: upload is the bytes, commit the "
            "rest of the way from the seal in host memory.",
            "s",
            Query(f"histogram_quantile(0.5, {buckets})", "{{stage}}"),
        ),
        graph(
            "Bytes to storage",
            "Bytes of committed checkpoints.",
            "Bps",
            Query(
                "sum by (job_id) "
                f"(rate(outlast_checkpoint_bytes_total{{{_JOBS}}}[$__rate_interval]))",
                "{{job_id}}",
            ),
        ),
        graph(
            "Failures",
            "By the stage that failed; retention is the removal of old ones.",
            "none",
            Query(
                f"sum by (job_id, stage) (outlast_checkpoint_failures_total{{{_JOBS}}})",
                "{{job_id}} {{stage}}",
            ),
        ),
        graph(
            "Uploads by node",
            "Checkpoints that each node committed, and troubles on the way.",
            "none",
            Query("sum by (node, outcome) (outlast_agent_uploads_total)", "{{node}} {{outcome}}"),
        ),
    )


def _memory(whole: builders.Dashboard) -> None:
    whole.with_row(heading("Host memory"))
    stall = f'outlast_rank_phase_seconds_total{{{_JOBS},phase="checkpoint"}}[$__rate_interval]'
    for panel in (
        graph(
            "Stall of training",
            "Share of its time that a rank stands still while its state is copied to host memory.",
            "percentunit",
            Query(f"max by (job_id) (rate({stall}))", "{{job_id}} slowest rank"),
            Query(f"avg by (job_id) (rate({stall}))", "{{job_id}} mean"),
        ),
        graph(
            "Host memory",
            "Memory that checkpoints take on each node.",
            "bytes",
            Query("max by (node) (outlast_agent_host_memory_bytes)", "{{node}}"),
        ),
        *_guarded(),
        *_copies(),
    ):
        whole.with_panel(panel)


def _guarded() -> tuple[Builder[Panel], ...]:
    within = "[$__rate_interval]"
    return (
        graph(
            "Checksums of host memory",
            "Bytes that agents checksum a second.",
            "Bps",
            Query(
                f"sum by (node) (rate(outlast_agent_slot_checksum_bytes_total{within}))", "{{node}}"
            ),
        ),
        graph(
            "Slots by outcome",
            "Slots of host memory that were checksummed, overwritten before that, or refused as "
            "damaged.",
            "none",
            Query(
                "sum by (node, outcome) (outlast_agent_slots_guarded_total)",
                "{{node}} {{outcome}}",
            ),
        ),
        graph(
            "Time without a checksum",
            "Mean time from the seal of a slot to its checksum: damage in between is not found.",
            "s",
            Query(
                f"sum by (node) (rate(outlast_agent_slot_checksum_delay_seconds_total{within})) / "
                f"sum by (node) (rate(outlast_agent_slots_guarded_total{within}))",
                "{{node}}",
            ),
        ),
    )


def _copies() -> tuple[Builder[Panel], ...]:
    within = "[$__rate_interval]"
    return (
        graph(
            "Copies between nodes",
            "Bytes of host memory that nodes send, receive, and fetch after a loss.",
            "Bps",
            Query(
                f"sum by (node, way) (rate(outlast_agent_replica_bytes_total{within}))",
                "{{node}} {{way}}",
            ),
        ),
        graph(
            "Copies that are held",
            "Ranks of other nodes with a copy on each node, and by how many steps copies are "
            "behind.",
            "none",
            Query("max by (node) (outlast_agent_replicas_held)", "{{node}} ranks"),
            Query("max by (node) (outlast_agent_replica_lag_steps)", "{{node}} steps behind"),
        ),
        graph(
            "Copies that were brought",
            "Copies that other nodes brought: kept, torn on the way, refused.",
            "none",
            Query(
                "sum by (node, outcome) (outlast_agent_replicas_brought_total)",
                "{{node}} {{outcome}}",
            ),
        ),
        graph(
            "Ranks looked after at starts",
            "Ranks whose state was present, fetched from another node, or lost.",
            "none",
            Query(
                "sum by (node, outcome) (outlast_agent_replica_fetches_total)",
                "{{node}} {{outcome}}",
            ),
        ),
    )
