"""Nodes: their states, their ranks, and the machines below."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.dashboard import Panel

from deploy.grafana.generate.panels import (
    Query,
    board,
    choice,
    graph,
    heading,
    heat_map,
    rows,
    states,
)

_NODES = 'node=~"$node"'


def dashboard() -> builders.Dashboard:
    """One or all nodes."""
    whole = board("outlast-nodes", "Nodes", "Nodes: state, ranks, processors, memory, links, GPUs.")
    whole.with_variable(choice("node", "Node", "label_values(outlast_node_state, node)", many=True))
    for title, panels in (
        ("State", _state()),
        ("Ranks", _ranks()),
        ("Machine", _machine()),
        ("Links", (*_network(), *_rdma())),
        ("GPUs", _gpus()),
    ):
        whole.with_row(heading(title))
        for panel in panels:
            whole.with_panel(panel)
    return whole


def _state() -> tuple[Builder[Panel], ...]:
    return (
        states(
            "State",
            "The state of each node.",
            Query(
                f"max by (node, state) (outlast_node_state{{{_NODES}}}) == 1", "{{node}} {{state}}"
            ),
        ),
        graph(
            "Silence",
            "Time since a node was heard.",
            "s",
            Query(f"max by (node) (outlast_node_heartbeat_age_seconds{{{_NODES}}})", "{{node}}"),
        ),
        _clock(),
        graph(
            "Workers",
            "Worker processes on each node.",
            "none",
            Query(f"max by (node) (outlast_agent_workers_running{{{_NODES}}})", "{{node}}"),
        ),
        rows(
            "Verdicts of checks",
            "Findings by test and verdict since the controller began.",
            f"sum by (node, test, verdict) (outlast_diagnostic_findings_total{{{_NODES}}})",
        ),
        rows(
            "Matmul",
            "Float32 matmul speed of one worker, as the node's last check measured it.",
            f"max by (node) (outlast_node_matmul_flops_per_second{{{_NODES}}})",
            unit="flops",
        ),
        graph(
            "Worker exits",
            "Workers that ended, by how.",
            "none",
            Query(
                f"sum by (node, outcome) (outlast_agent_worker_exits_total{{{_NODES}}})",
                "{{node}} {{outcome}}",
            ),
        ),
    )


def _clock() -> Builder[Panel]:
    return graph(
        "Clock",
        "By how much a node's clock is ahead of the controller's, from the round trips of "
        "heartbeats, and by how much that may be wrong.",
        "s",
        Query(f"max by (node) (outlast_node_clock_ahead_seconds{{{_NODES}}})", "{{node}} ahead"),
        Query(f"max by (node) (outlast_node_clock_error_seconds{{{_NODES}}})", "{{node}} error"),
    )


def _against_peers() -> Builder[Panel]:
    """Ranks over time, each against the median of its stage."""
    metric, within = "outlast_rank_work_seconds_total", "[$__rate_interval]"
    own = f"max by (job_id, stage, rank, node) (rate({metric}{{{_NODES}}}{within}))"
    of_all = f"max by (job_id, stage, rank) (rate({metric}{within}))"
    median = f"quantile by (job_id, stage) (0.5, {of_all})"
    return heat_map(
        "Ranks against their peers",
        "Own forward and backward work of each rank, as a ratio to the median of its stage: red is "
        "twice, blue is half. Choose some nodes of a large job.",
        "none",
        Query(
            f"{own} / on (job_id, stage) group_left () {median}",
            "{{job_id}} rank {{rank}} on {{node}}",
        ),
        least=0.5,
        most=2.0,
    )


def _ranks() -> tuple[Builder[Panel], ...]:
    return (
        _against_peers(),
        graph(
            "Busiest ranks",
            "The ten ranks with the largest share of time in their own forward and backward work. "
            "One that stands out among its stage holds up all others.",
            "percentunit",
            Query(
                "topk(10, max by (job_id, stage, rank, node) "
                f"(rate(outlast_rank_work_seconds_total{{{_NODES}}}[$__rate_interval])))",
                "{{job_id}} stage {{stage}} rank {{rank}} on {{node}}",
            ),
        ),
        graph(
            "Ranks that wait longest",
            "The ten ranks with the largest share of time in operations.",
            "percentunit",
            Query(
                "topk(10, sum by (job_id, rank, node) "
                f"(rate(outlast_rank_communication_seconds_total{{{_NODES}}}[$__rate_interval])))",
                "{{job_id}} rank {{rank}} on {{node}}",
            ),
        ),
        graph(
            "Ranks behind",
            "The ten ranks that are furthest behind the first of their job.",
            "none",
            Query(
                "topk(10, max by (job_id) (outlast_rank_step) - on (job_id) group_right () "
                f"max by (job_id, rank, node) (outlast_rank_step{{{_NODES}}}))",
                "{{job_id}} rank {{rank}} on {{node}}",
            ),
        ),
        rows(
            "Where ranks are",
            "The phase of each rank, and 1 if it is inside an operation with others. Of ranks that "
            "hang, one that is in none holds up those that are.",
            "max by (job_id, rank, stage, node, phase) "
            f"(outlast_rank_phase_info{{{_NODES}}}) "
            "* on (job_id, rank) group_left () "
            "max by (job_id, rank) (outlast_rank_in_operation)",
        ),
        rows(
            "Last operations",
            "Number of the last operation of each rank within its group.",
            f"bottomk(20, max by (job_id, rank, node) (outlast_rank_last_op_sequence{{{_NODES}}}))",
        ),
    )


def _machine() -> tuple[Builder[Panel], ...]:
    disk = f"outlast_host_disk_bytes_total{{{_NODES}}}[$__rate_interval]"
    return (
        graph(
            "Processors busy",
            "Share of the time of all processors that was not idle.",
            "percentunit",
            Query(f"node:outlast_host_cpu_busy:rate5m{{{_NODES}}}", "{{node}}"),
        ),
        graph(
            "Memory left",
            "Share of memory that programs can still get.",
            "percentunit",
            Query(f"node:outlast_host_memory_available:ratio{{{_NODES}}}", "{{node}}"),
        ),
        graph(
            "Free space",
            "Share of the file systems below the agent's folders that is free.",
            "percentunit",
            Query(
                f"node_folder:outlast_host_filesystem_free:ratio{{{_NODES}}}", "{{node}} {{folder}}"
            ),
        ),
        graph(
            "Disks",
            "Bytes read from and written to disks.",
            "Bps",
            Query(f"sum by (node, direction) (rate({disk}))", "{{node}} {{direction}}"),
        ),
        graph(
            "Disks busy",
            "Share of time in which a disk had requests under way.",
            "percentunit",
            Query(
                "max by (node, device) "
                f"(rate(outlast_host_disk_busy_seconds_total{{{_NODES}}}[$__rate_interval]))",
                "{{node}} {{device}}",
            ),
        ),
        graph(
            "Processes killed for want of memory",
            "Kills by the kernel since the machine started.",
            "none",
            Query(f"max by (node) (outlast_host_oom_kills_total{{{_NODES}}})", "{{node}}"),
        ),
    )


def _network() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "Network",
            "Bytes through the network devices of each node.",
            "Bps",
            Query(
                "sum by (node, device, direction) "
                f"(rate(outlast_nic_bytes_total{{{_NODES}}}[$__rate_interval]))",
                "{{node}} {{device}} {{direction}}",
            ),
        ),
        *_links(),
        graph(
            "Links that went down",
            "Times that a link was lost since the machine started.",
            "none",
            Query(
                f"max by (node, device) (outlast_nic_link_down_events_total{{{_NODES}}})",
                "{{node}} {{device}}",
            ),
        ),
        graph(
            "Bad packets",
            "Packets with errors and dropped ones.",
            "pps",
            Query(
                "sum by (node, device, kind) "
                f"(rate(outlast_nic_errors_total{{{_NODES}}}[$__rate_interval]))",
                "{{node}} {{device}} {{kind}}",
            ),
        ),
    )


def _links() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "Links, by milliseconds",
            "The most that a link carried in a few milliseconds of the last two seconds, and the "
            "mean, in each direction, while ranks run.",
            "Bps",
            Query(
                "max by (node, link, direction, of) "
                f'(outlast_link_window_bytes_per_second{{{_NODES},of=~"mean|most"}})',
                "{{node}} {{link}} {{direction}} {{of}}",
            ),
        ),
        graph(
            "Silence of links",
            "The longest time without traffic, up to the present or in the last two seconds, and "
            "the period of the traffic where it has a rhythm of up to 10 s.",
            "s",
            Query(
                f"max by (node, link) (outlast_link_longest_silence_seconds{{{_NODES}}})",
                "{{node}} {{link}} silence",
            ),
            Query(
                f"max by (node, link) (outlast_link_period_seconds{{{_NODES}}})",
                "{{node}} {{link}} period",
            ),
        ),
    )


def _rdma() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "RDMA",
            "Bytes through the RDMA ports of each node.",
            "Bps",
            Query(
                "sum by (node, device, port, direction) "
                f"(rate(outlast_rdma_bytes_total{{{_NODES}}}[$__rate_interval]))",
                "{{node}} {{device}}/{{port}} {{direction}}",
            ),
        ),
        graph(
            "RDMA errors",
            "Link losses and symbol errors of RDMA ports.",
            "none",
            Query(
                f"sum by (node, device, port, kind) (outlast_rdma_errors_total{{{_NODES}}})",
                "{{node}} {{device}}/{{port}} {{kind}}",
            ),
        ),
    )


def _gpus() -> tuple[Builder[Panel], ...]:
    def by_gpu(title: str, description: str, unit: str, metric: str) -> Builder[Panel]:
        query = Query(f"max by (node, gpu) ({metric}{{{_NODES}}})", "{{node}} GPU {{gpu}}")
        return graph(title, description, unit, query)

    return (
        by_gpu(
            "GPUs busy",
            "Share of time with a kernel running.",
            "percentunit",
            "outlast_gpu_utilization_ratio",
        ),
        by_gpu("GPU memory", "Device memory in use.", "bytes", "outlast_gpu_memory_used_bytes"),
        by_gpu("GPU power", "Power drawn.", "watt", "outlast_gpu_power_watts"),
        by_gpu(
            "GPU temperature",
            "Temperature of the die.",
            "celsius",
            "outlast_gpu_temperature_celsius",
        ),
        by_gpu(
            "GPU clock",
            "Clock of the multiprocessors; one that is low under load is throttled.",
            "hertz",
            "outlast_gpu_sm_clock_hertz",
        ),
        *_gpu_devices(),
    )


def _gpu_devices() -> tuple[Builder[Panel], ...]:
    return (
        graph(
            "GPU energy",
            "Energy a second, as the driver counts it: between two scrapes, too.",
            "watt",
            Query(
                "max by (node, gpu) "
                f"(rate(outlast_gpu_energy_joules_total{{{_NODES}}}[$__rate_interval]))",
                "{{node}} GPU {{gpu}}",
            ),
        ),
        rows(
            "GPU models",
            "The memory of each GPU, with its name and number.",
            f"max by (node, gpu, name, uuid) (outlast_gpu_info{{{_NODES}}}) "
            "* on (node, gpu) group_left () "
            f"max by (node, gpu) (outlast_gpu_memory_size_bytes{{{_NODES}}})",
            unit="bytes",
        ),
        graph(
            "GPU memory errors",
            "Errors since the driver was loaded.",
            "none",
            Query(
                f"max by (node, gpu, kind) (outlast_gpu_ecc_errors_total{{{_NODES}}})",
                "{{node}} GPU {{gpu}} {{kind}}",
            ),
        ),
        rows(
            "XIDs",
            "Errors that GPUs reported since their agent began.",
            f"max by (node, gpu, xid) (outlast_gpu_xid_events_total{{{_NODES}}})",
        ),
    )
