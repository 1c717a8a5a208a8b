"""What a plan says, as values: estimates, projections, and what programs read of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outlast.cli.errors import bad_input

if TYPE_CHECKING:
    from outlast.devices import Device
    from outlast.spec import JobSpec
    from trainer.core.estimate import Plan
    from trainer.core.projection import Machine, Projection

# One adapter of 200 Gbit/s for each device.
DEFAULT_LINK = "25GB/s"
# Of a device's peak, what large 16-bit matrix products come near to.
DEFAULT_KERNELS = 0.7
# NCCL's ring among eight devices: 4 to 10 us, and 0.5 to 3.4 us for each of seven steps (its tuning
# tables); between nodes more.
DEFAULT_LATENCY_US = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """The machine that a step is projected on, as it is given on the command line."""

    device: str
    link: str = DEFAULT_LINK
    latency_us: float = DEFAULT_LATENCY_US
    kernels: float = DEFAULT_KERNELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """A step on a device, and what was assumed."""

    device: Device
    link_bytes_per_s: float
    latency_s: float
    kernel_share: float
    peak_flops_per_s: float
    step: Projection


def estimate(spec: JobSpec, *, on_gpu: bool = False) -> Plan:
    """What the job will need."""
    from outlast.sizing.of_spec import plan_input
    from trainer.core.estimate import plan as plan_job

    return plan_job(plan_input(spec, on_gpu=on_gpu))


def project(spec: JobSpec, assumed: Assumed) -> Projected:
    """A step of the job on a device.

    Raises:
        CliError: the device or the link is not one, or the device lacks the precision.
    """
    from outlast.sizing.of_spec import plan_input
    from trainer.core.projection import project as project_step

    known, machine = machine_of(spec, assumed)
    return Projected(
        device=known,
        link_bytes_per_s=machine.link_bytes_per_s,
        latency_s=machine.latency_s,
        kernel_share=machine.kernel_share,
        peak_flops_per_s=machine.peak_flops_per_s,
        step=project_step(plan_input(spec), machine),
    )


def machine_of(spec: JobSpec, assumed: Assumed) -> tuple[Device, Machine]:
    """The device, and it as a rank of the job computes on.

    Raises:
        CliError: the device or the link is not one.
    """
    from outlast.devices import find_device, parse_quantity
    from trainer.core.projection import Machine

    with bad_input():
        known = find_device(assumed.device)
        speed = parse_quantity(assumed.link, "B/s")
    return known, Machine(
        peak_flops_per_s=known.peak_flops_per_s[spec.precision],
        kernel_share=assumed.kernels,
        # Devices of a node may have links of their own.
        peer_bytes_per_s=known.peer_bytes_per_s or speed,
        link_bytes_per_s=speed,
        ranks_per_node=spec.workers_per_node,
        latency_s=assumed.latency_us / 1e6,
    )


def plan_facts(spec: JobSpec, found: Plan) -> dict[str, Any]:
    """The plan as plain values, groups and totals included."""
    from checkpoint.sizing import node_host_memory_bytes

    layout = spec.layout
    return {
        "name": spec.name,
        **asdict(found),
        "total_tokens": found.tokens_per_step * spec.steps,
        "total_flops": found.flops_per_token * found.tokens_per_step * spec.steps,
        "nodes": spec.num_nodes,
        "workers_per_node": spec.workers_per_node,
        "node_host_memory_bytes": node_host_memory_bytes(spec),
        "standbys": recommended_standbys(spec),
        "groups": {
            "tp": layout.tp_groups(),
            "dp": layout.dp_groups(),
            "pp": layout.pp_groups(),
            **({"cp": layout.cp_groups()} if layout.cp > 1 else {}),
            **({"ep": layout.ep_groups()} if layout.ep > 1 else {}),
        },
        "ranks": [{**asdict(rank), "device_bytes": rank.device_bytes} for rank in found.ranks],
        "communication": {
            **asdict(found.communication),
            "total_bytes": found.communication.total_bytes,
        },
        "spec": spec.model_dump(mode="json"),
    }


def recommended_standbys(spec: JobSpec) -> int:
    """Nodes to hold ready, at the failure rate that Llama 3 was published with."""
    from controller.core.standbys import standbys_for
    from controller.sim.mixes import MIXES

    return standbys_for(spec.num_nodes, MIXES["llama3"].per_1000_node_days / 1000.0)


def projection_facts(projected: Projected) -> dict[str, Any]:
    """The projection and its assumptions as plain values."""
    return {
        "device": projected.device.name,
        "source": projected.device.source,
        "memory_bytes": projected.device.memory_bytes,
        "peak_flops_per_s": projected.peak_flops_per_s,
        "kernel_share": projected.kernel_share,
        "link_bytes_per_s": projected.link_bytes_per_s,
        "latency_s": projected.latency_s,
        **asdict(projected.step),
    }
