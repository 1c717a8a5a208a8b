"""`outlast plan` and `outlast schema`: what a spec means, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from outlast.cli import output
from outlast.cli.connect import where_nodes_are
from outlast.cli.errors import CliError
from outlast.cli.folders import DEFAULT_STATE_DIR
from outlast.cli.options import Assignments, Controller, Json, SpecFile, StateDir
from outlast.cli.plan_facts import (
    DEFAULT_KERNELS,
    DEFAULT_LATENCY_US,
    DEFAULT_LINK,
    Assumed,
    estimate,
    plan_facts,
    project,
    projection_facts,
)
from outlast.cli.plan_search import Wanted, search_plan

DEFAULT_TOP = 5

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
LatencyOption = Annotated[
    float,
    typer.Option(
        "--latency",
        metavar="MICROSECONDS",
        min=0.0,
        max=1e6,
        help="With --device: latency of a message.",
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
SearchOption = Annotated[
    bool,
    typer.Option(
        "--search",
        help="Find the fastest layout on --nodes of --device, whatever layout the spec has.",
    ),
]
NodesOption = Annotated[
    int,
    typer.Option(
        "--nodes",
        metavar="N",
        min=0,
        help="With --search: nodes, of resources.workers_per_node ranks, or 8.",
    ),
]
HoldOption = Annotated[
    list[str],
    typer.Option(
        "--hold",
        metavar="FIELD",
        help="With --search: keep what the spec says of a field, such as parallel.recompute; may "
        "be repeated.",
    ),
]
MemoryOption = Annotated[
    str,
    typer.Option(
        "--memory",
        metavar="BYTES",
        help="With --search: what a rank may use, such as 72G; 90 % of the device's unless given.",
    ),
]
PriceOption = Annotated[
    float,
    typer.Option(
        "--price",
        metavar="AMOUNT",
        min=0.0,
        help="With --search: of a device for an hour, to print what training costs.",
    ),
]
TopOption = Annotated[
    int,
    typer.Option("--top", metavar="N", min=1, help="With --search: print so many layouts."),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(plan)
    app.command()(schema)


def plan(
    spec: SpecFile,
    set_: Assignments = [],  # noqa: B006
    device: DeviceOption = "",
    link: LinkOption = DEFAULT_LINK,
    latency: LatencyOption = DEFAULT_LATENCY_US,
    kernels: KernelsOption = DEFAULT_KERNELS,
    search: SearchOption = False,
    nodes: NodesOption = 0,
    hold: HoldOption = [],  # noqa: B006
    memory: MemoryOption = "",
    price: PriceOption = 0.0,
    top: TopOption = DEFAULT_TOP,
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

    With --search it tries every tp, cp, pp, dp, micro-batch, schedule, virtual stages, recompute
    and ZeRO level that the rules of the spec and the device's memory allow, and prints the fastest
    of each mesh, why it is faster, and the sections of the spec to paste.
    """
    assumed = Assumed(device=device, link=link, latency_us=latency, kernels=kernels)
    wanted = Wanted(nodes, assumed, memory, tuple(hold), price, top)
    _check_options(wanted, search=search)
    if search:
        search_plan(spec, set_, wanted, as_json=json)
    else:
        _plan_job(_Job(spec, set_, controller, state_dir), assumed, as_json=json)


class _Job(NamedTuple):
    """A spec, and whose nodes it is for."""

    path: Path
    assignments: Sequence[str]
    controller: str
    state_dir: Path


def _plan_job(job: _Job, assumed: Assumed, *, as_json: bool) -> None:
    """Of the layout that the spec has."""
    from outlast.cli.fit import asked_fit, fit_line, fit_warnings
    from outlast.cli.plan_text import data_lines, print_plan, warnings
    from outlast.cli.specfile import load_spec

    read = load_spec(job.path, job.assignments, where_nodes_are(job.controller, job.state_dir))
    checked = read.spec
    if checked.is_script:
        raise CliError(
            "the spec is fine; what a script needs and how fast it is cannot be estimated, as its "
            "model is its own (workload.command)"
        )
    projected = project(checked, assumed) if assumed.device else None
    # A number is no name: what it is the peak of is not known.
    on_gpu = projected is not None and projected.device.reported_as != ""
    found = estimate(checked, on_gpu=on_gpu)
    fit = asked_fit(read.document, job.controller, job.state_dir)
    if as_json:
        facts = plan_facts(checked, found)
        if projected is not None:
            facts["projection"] = projection_facts(projected)
        lines = [*warnings(checked, found, projected), *read.seen.warnings, *fit_warnings(fit)]
        facts |= {"data": data_lines(read), "nodes_that_fit": fit_line(fit)}
        output.print_json({**facts, "warnings": lines})
    else:
        print_plan(read, found, projected, fit=(fit_line(fit), fit_warnings(fit)))


def _check_options(wanted: Wanted, *, search: bool) -> None:
    """Options of a search come with one, and those of a projection with a device."""
    assumed = wanted.assumed
    if search and not wanted.nodes:
        raise CliError("--nodes: is required with --search; allowed: 1 or more")
    if search and not assumed.device:
        raise CliError(
            "--device: is required with --search; allowed: a name, or FLOP/s with --memory"
        )
    others = (wanted.nodes, wanted.held, wanted.memory, wanted.price, wanted.top != DEFAULT_TOP)
    if not search and any(others):
        names = "--nodes, --hold, --memory, --price and --top"
        raise CliError(f"{names}: are for a search; allowed: with --search")
    if not assumed.device and assumed != Assumed(device=""):
        names = "--link, --latency and --kernels"
        raise CliError(f"{names}: are of a projection; allowed: with --device")


def schema() -> None:
    """Print the JSON schema of the job spec, for editors."""
    from outlast.spec import JobSpec

    document = JobSpec.model_json_schema()
    output.print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **document})
