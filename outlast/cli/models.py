"""`outlast models`: the published models that a spec can name, and what each is."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.cli import output
from outlast.cli.errors import CliError
from outlast.cli.options import Json

if TYPE_CHECKING:
    from outlast.presets import Preset

_HEADER = ("NAME", "PARAMETERS", "FLOP/TOKEN", "STATE", "CHECKPOINT", "SOURCE")
# What large models are trained with; state and checkpoints are as large in fp16.
_PRECISION = "bf16"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(models)


def models(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="One of them; all unless given.")
    ] = "",
    json: Json = False,
) -> None:
    """List the published models that `model.preset` of a spec may name.

    FLOP/TOKEN is forward and backward, with the attention that masks let through. STATE
    is all weights, gradients and AdamW's state in bf16 with an fp32 copy, activations not
    counted; CHECKPOINT is what of it is saved.
    """
    from outlast.presets import PRESETS

    known = PRESETS
    if name and name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise CliError(f"there is no model {name!r}{meant}; there are: {', '.join(known)}")
    found = [model_facts(each, preset) for each, preset in known.items() if name in ("", each)]
    if json:
        output.print_json({"models": found})
    elif name:
        output.print_lines(_lines(found[0]))
    else:
        output.print_table(_HEADER, [_row(each) for each in found], empty="")


def model_facts(name: str, preset: Preset) -> dict[str, Any]:
    """A preset and its sizes as plain values."""
    from outlast.flops import Convention, flops_per_token
    from outlast.sizing.of_spec import plan_input
    from outlast.sizing.parameters import total_parameters
    from outlast.spec import JobSpec

    document = {"name": name, "precision": _PRECISION, "model": {"preset": name}}
    spec = JobSpec.model_validate(document)
    facts = plan_input(spec)
    parameters, sizes = total_parameters(facts), facts.sizes
    saved_bytes = sizes.master + 2 * sizes.moment
    return {
        "name": name,
        "source": preset.source,
        "parameters": parameters,
        "flops_per_token": flops_per_token(spec.model.shape, Convention.WINDOWED),
        "flops_per_token_full_attention": flops_per_token(spec.model.shape, Convention.FULL),
        "precision": _PRECISION,
        "state_bytes": parameters * (sizes.weight + sizes.gradient + saved_bytes),
        "checkpoint_bytes": parameters * saved_bytes,
        "model": dict(preset.fields),
    }


def _row(facts: dict[str, Any]) -> tuple[str, ...]:
    from outlast.cli import describe

    return (
        facts["name"],
        _short(facts["parameters"]),
        describe.flops(facts["flops_per_token"]),
        describe.size(facts["state_bytes"]),
        describe.size(facts["checkpoint_bytes"]),
        facts["source"],
    )


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from outlast.cli import describe

    windowed, full = facts["flops_per_token"], facts["flops_per_token_full_attention"]
    return [
        ("model", f"{facts['name']} ({facts['source']})"),
        ("parameters", f"{facts['parameters']:,}"),
        (
            "FLOPs",
            f"{describe.flops(windowed)} per token, forward and backward "
            f"({describe.flops(full)} if every token attended to all)",
        ),
        (
            "state",
            f"{describe.size(facts['state_bytes'])} in {_PRECISION}, of which a checkpoint has "
            f"{describe.size(facts['checkpoint_bytes'])}",
        ),
        ("spec", "model:"),
        ("spec", f"  preset: {facts['name']}  # stands for:"),
        *(("spec", f"  {key}: {_yaml(value)}") for key, value in facts["model"].items()),
    ]


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def _short(count: int) -> str:
    """A number of parameters as models are called by it."""
    unit, size = next(
        (unit, size) for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if count >= size
    )
    return f"{count / size:.4g}{unit}"
