"""`outlast plan` and `outlast schema`: what a spec means, without running it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import output
from outlast.cli.connect import where_nodes_are
from outlast.cli.errors import CliError, ExitCode
from outlast.cli.options import (
    DEFAULT_STATE_DIR,
    Assignments,
    Controller,
    Json,
    SpecFile,
    StateDir,
)

if TYPE_CHECKING:
    from outlast.devices import Device
    from outlast.spec import JobSpec
    from trainer.core.estimate import Plan
    from trainer.core.projection import Projection

# One adapter of 200 Gbit/s for each device.
DEFAULT_LINK = "25GB/s"
# Of a device's peak, what large 16-bit matrix products come near to.
DEFAULT_KERNELS = 0.7

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="NAME|FLOPS",
        help="Project a step on this device: a100-40gb, a100-80gb, h100, h200, or a peak in "
        "FLOP/s, such as 90G.",
    ),
]
LinkOption = Annotated[
    str,
    typer.Option(
        "--link",
        metavar="BYTES/S",
        help="With --device: what one rank sends over the network in a second.",
    ),
]
KernelsOption = Annotated[
    float,
    typer.Option(
        "--kernels",
        metavar="SHARE",
        min=0.01,
        max=1.0,
        help="With --device: share of its peak that matrix products reach.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """A step on a device, and what was assumed."""

    device: Device
    link_bytes_per_s: float
    kernel_share: float
    peak_flops_per_s: float
    step: Projection


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(plan)
    app.command()(schema)


def plan(
    spec: SpecFile,
    set_: Assignments = [],  # noqa: B006
    device: DeviceOption = "",
    link: LinkOption = DEFAULT_LINK,
    kernels: KernelsOption = DEFAULT_KERNELS,
    json: Json = False,
    controller: Controller = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
) -> None:
    """Check a job spec and print what it will need. Runs nothing.

    Prints the layout, parameters, memory of a rank by part, tmpfs that a node needs for
    checkpoints in host memory, pipeline bubble and communication per step; with --device
    also the time of a step and its MFU, and whether the job fits. Warns of what will be
    slow or will not fit. Relative paths in the spec are below the current folder. Where a
    controller runs nodes on this machine, files that the spec names must be there. A
    controller that answers is asked whether its nodes have what the job needs.
    """
    from outlast.cli.fit import asked_fit, fit_line, fit_warnings
    from outlast.cli.plan_text import data_lines, print_plan, warnings
    from outlast.cli.specfile import load_spec

    read = load_spec(spec, set_, where_nodes_are(controller, state_dir))
    checked = read.spec
    projected = project(checked, device, link, kernels) if device else None
    # A number is no name: what it is the peak of is not known.
    on_gpu = projected is not None and projected.device.reported_as != ""
    found = estimate(checked, on_gpu=on_gpu)
    fit = asked_fit(read.document, controller, state_dir)
    if json:
        facts = plan_facts(checked, found)
        if projected is not None:
            facts["projection"] = projection_facts(projected)
        lines = [*warnings(checked, found, projected), *read.seen.warnings, *fit_warnings(fit)]
        facts |= {"data": data_lines(read), "nodes_that_fit": fit_line(fit)}
        output.print_json({**facts, "warnings": lines})
    else:
        print_plan(read, found, projected, fit=(fit_line(fit), fit_warnings(fit)))


def schema() -> None:
    """Print the JSON schema of the job spec, for editors."""
    from outlast.spec import JobSpec

    document = JobSpec.model_json_schema()
    output.print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **document})


def estimate(spec: JobSpec, *, on_gpu: bool = False) -> Plan:
    """What the job will need."""
    from trainer.core.estimate import plan as plan_job
    from trainer.planning import plan_input

    return plan_job(plan_input(spec, on_gpu=on_gpu))


def project(spec: JobSpec, device: str, link: str, kernels: float) -> Projected:
    """A step of the job on a device.

    Raises:
        CliError: the device or the link is not one, or the device lacks the precision.
    """
    from outlast.devices import find_device, parse_quantity
    from trainer.core.projection import Machine
    from trainer.core.projection import project as project_step
    from trainer.planning import plan_input

    try:
        known = find_device(device)
        speed = parse_quantity(link, "B/s")
    except ValueError as error:
        raise CliError(str(error), ExitCode.BAD_INPUT) from error
    peak = known.peak_flops_per_s[spec.precision]
    machine = Machine(
        peak_flops_per_s=peak,
        kernel_share=kernels,
        # Devices of a node may have links of their own.
        peer_bytes_per_s=known.peer_bytes_per_s or speed,
        link_bytes_per_s=speed,
        ranks_per_node=spec.workers_per_node,
    )
    return Projected(
        device=known,
        link_bytes_per_s=speed,
        kernel_share=kernels,
        peak_flops_per_s=peak,
        step=project_step(plan_input(spec), machine),
    )


def plan_facts(spec: JobSpec, found: Plan) -> dict[str, Any]:
    """The plan as plain values, groups and totals included."""
    from trainer.planning import node_host_memory_bytes

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
        **asdict(projected.step),
    }
