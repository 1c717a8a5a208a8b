"""A plan as the controller's page shows it before a job is submitted."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from outlast.cli.plan_facts import (
    DEFAULT_KERNELS,
    DEFAULT_LATENCY_US,
    DEFAULT_LINK,
    Assumed,
    estimate,
    project,
    projection_facts,
    recommended_standbys,
)

if TYPE_CHECKING:
    from controller.planner import OnMachine
    from outlast.spec import JobSpec


def plan_document(spec: JobSpec, machine: OnMachine) -> dict[str, Any]:
    """What `outlast plan` prints of a spec whose rules hold, as values.

    Of each pipeline stage one rank is described, so that it is small for any number of ranks.

    Raises:
        CliError: the device or the link is not one.
    """
    from checkpoint.sizing import node_host_memory_bytes
    from outlast.cli.plan_text import warnings

    projected = project(spec, _assumed(machine)) if machine.device else None
    on_gpu = projected is not None and projected.device.reported_as != ""
    found, layout = estimate(spec, on_gpu=on_gpu), spec.layout
    return {
        "name": spec.name,
        "layout": {
            "tp": layout.tp,
            "pp": layout.pp,
            "dp": layout.num_replicas,
            "ep": layout.ep,
            "cp": layout.cp,
        },
        "num_ranks": layout.world_size,
        "nodes": spec.num_nodes,
        "workers_per_node": spec.workers_per_node,
        "parameters": found.parameters,
        "tokens_per_step": found.tokens_per_step,
        "total_tokens": found.tokens_per_step * spec.steps,
        "num_micro_batches": found.num_micro_batches,
        "flops_per_token": found.flops_per_token,
        "total_flops": found.flops_per_token * found.tokens_per_step * spec.steps,
        "bubble": found.bubble,
        "stages": [
            {**asdict(rank), "device_bytes": rank.device_bytes, "in_flight": in_flight}
            for rank, in_flight in zip(found.ranks, found.peak_in_flight, strict=True)
        ],
        "communication": {
            **asdict(found.communication),
            "total_bytes": found.communication.total_bytes,
        },
        "node_host_memory_bytes": node_host_memory_bytes(spec),
        "standbys": recommended_standbys(spec),
        "projection": None if projected is None else projection_facts(projected),
        "warnings": warnings(spec, found, projected),
    }


def _assumed(machine: OnMachine) -> Assumed:
    latency_us = machine.latency_us
    return Assumed(
        device=machine.device,
        link=machine.link or DEFAULT_LINK,
        latency_us=DEFAULT_LATENCY_US if latency_us is None else latency_us,
        kernels=machine.kernels or DEFAULT_KERNELS,
    )
