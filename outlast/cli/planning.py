"""`outlast plan` and `outlast schema`: what a spec means, without running it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from outlast.cli import output
from outlast.cli.options import Assignments, Json, SpecFile
from outlast.cli.words import size

if TYPE_CHECKING:
    from outlast.spec import JobSpec
    from trainer.core.estimate import Plan

# More groups than this tell a person nothing that the first ones do not.
_MAX_GROUPS = 8


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(plan)
    app.command()(schema)


def plan(spec: SpecFile, set_: Assignments = [], json: Json = False) -> None:  # noqa: B006
    """Check a job spec and print what it will need. Runs nothing.

    Prints the layout, parameters, memory of a rank by part, pipeline bubble and
    communication per step.
    """
    from outlast.cli.specfile import load_spec

    checked = load_spec(spec, set_)
    found = estimate(checked)
    if json:
        output.print_json(plan_facts(checked, found))
    else:
        print_plan(checked, found)


def schema() -> None:
    """Print the JSON schema of the job spec, for editors."""
    from outlast.spec import JobSpec

    document = JobSpec.model_json_schema()
    output.print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **document})


def estimate(spec: JobSpec) -> Plan:
    """What the job will need."""
    from trainer.core.estimate import PlanInput
    from trainer.core.estimate import plan as plan_job

    model, parallel = spec.model, spec.parallel
    return plan_job(
        PlanInput(
            layers=model.layers,
            hidden=model.hidden,
            heads=model.heads,
            mlp_hidden=model.mlp_hidden,
            vocab_size=model.vocab_size,
            seq_len=model.seq_len,
            tied_embeddings=model.tied_embeddings,
            tp=parallel.tp,
            pp=parallel.pp,
            dp=parallel.dp,
            # One tensor-parallel rank has the whole sequence either way.
            sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
            schedule=parallel.schedule,
            micro_batch=parallel.micro_batch,
            global_batch=spec.data.global_batch,
            bytes_per_value=8 if spec.precision == "fp64" else 4,
        )
    )


def plan_facts(spec: JobSpec, found: Plan) -> dict[str, Any]:
    """The plan as plain values, groups and totals included."""
    layout = spec.layout
    return {
        "name": spec.name,
        **asdict(found),
        "total_tokens": found.tokens_per_step * spec.steps,
        "total_flops": found.flops_per_token * found.tokens_per_step * spec.steps,
        "nodes": spec.num_nodes,
        "workers_per_node": spec.workers_per_node,
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


def print_plan(spec: JobSpec, found: Plan) -> None:
    """The plan for people."""
    layout, parallel = spec.layout, spec.parallel
    sequence = "on" if parallel.sequence_parallel and layout.tp > 1 else "off"
    per_token = found.flops_per_token
    total = per_token * found.tokens_per_step * spec.steps
    communication = found.communication
    output.print_lines(
        [
            ("job", f"{spec.name}: {spec.steps:,} steps, {spec.precision}, seed {spec.seed}"),
            (
                "layout",
                f"tp {layout.tp} x pp {layout.pp} x dp {layout.dp} = {found.world_size} ranks on "
                f"{spec.num_nodes} node(s) of {spec.workers_per_node}; sequence parallel "
                f"{sequence}",
            ),
            ("groups", _groups("tp", layout.tp_groups())),
            ("groups", _groups("dp", layout.dp_groups())),
            ("groups", _groups("pp", layout.pp_groups())),
            ("stages", f"{' + '.join(str(n) for n in found.stage_layers)} transformer blocks"),
            ("parameters", f"{found.parameters:,}"),
            (
                "batch",
                f"{found.tokens_per_step:,} tokens a step in {found.num_micro_batches} "
                f"micro-batches of {parallel.micro_batch} sequence(s) per replica",
            ),
            (
                "compute",
                f"{_flops(per_token)} a token, {_flops(per_token * found.tokens_per_step)} a step, "
                f"{_flops(total)} in all",
            ),
            (
                "bubble",
                f"{100 * found.bubble:.1f} % of a step ({parallel.schedule}); micro-batches in "
                f"flight by stage: {', '.join(str(n) for n in found.peak_in_flight)}",
            ),
            (
                "traffic",
                f"{size(communication.total_bytes)} sent per step by the busiest rank: "
                f"tp {size(communication.tp_bytes)}, dp {size(communication.dp_bytes)}, "
                f"pp {size(communication.pp_bytes)}, "
                f"tied embedding {size(communication.embedding_bytes)}",
            ),
        ]
    )
    print("\nmemory of one rank")
    output.print_table(
        (
            *("stage", "parameters", "weights", "gradients", "optimizer", "activations"),
            *("device total", "host checkpoints"),
        ),
        [
            (
                str(rank.stage),
                f"{rank.parameters:,}",
                size(rank.weights_bytes),
                size(rank.gradients_bytes),
                size(rank.optimizer_bytes),
                size(rank.activations_bytes),
                size(rank.device_bytes),
                size(rank.host_slots_bytes),
            )
            for rank in found.ranks
        ],
        empty="",
    )


def _groups(kind: str, groups: tuple[tuple[int, ...], ...]) -> str:
    shown = " ".join(f"[{' '.join(str(rank) for rank in group)}]" for group in groups[:_MAX_GROUPS])
    more = f" and {len(groups) - _MAX_GROUPS} more" if len(groups) > _MAX_GROUPS else ""
    return f"{kind} {shown}{more}"


def _flops(count: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} EFLOP"
