"""`outlast plan --search`: which layout of a job on given nodes is the fastest, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.cli import output
from outlast.cli.describe import size
from outlast.cli.errors import CliError
from outlast.cli.plan_facts import Assumed, machine_of
from outlast.cli.plan_text import inside_layers, layout_in_words
from outlast.durations import duration

if TYPE_CHECKING:
    from outlast.devices import Device
    from outlast.spec import JobSpec
    from trainer.core.advice import Advice
    from trainer.core.cost import Training
    from trainer.core.projection import Machine, Projection
    from trainer.core.search import Found
    from trainer.layouts import Layouts

# The context, the library of collectives and what an allocator loses are not tensors.
_USABLE = 0.9
# Terms that differ by less than this share of a step decide nothing.
_LEAST_SHOWN = 0.001
_TERMS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for on the command line."""

    nodes: int
    assumed: Assumed
    memory: str
    held: tuple[str, ...]
    price: float
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A search that has found something."""

    wanted: Wanted
    device: Device
    machine: Machine
    memory_bytes: float
    layouts: Layouts
    advice: tuple[Advice, ...]
    training: Training

    @property
    def found(self) -> tuple[Found, ...]:
        return self.layouts.searched.found

    @property
    def best(self) -> JobSpec:
        return self.layouts.specs[0]


def search_plan(path: Path, assignments: Sequence[str], wanted: Wanted, *, as_json: bool) -> None:
    """Search, and print what was found.

    Raises:
        CliError: what is wanted or the spec is wrong, or no layout fits.
    """
    result = _searched(path, assignments, wanted)
    if as_json:
        output.print_json(_facts(result))
    else:
        _print(result)


def _searched(path: Path, assignments: Sequence[str], wanted: Wanted) -> _Result:
    from outlast.cli.specfile import describe_problems, load_open_spec
    from outlast.problems import SpecError
    from outlast.rules.check import check
    from trainer.core.advice import advice
    from trainer.core.cost import training
    from trainer.layouts import LEFT_OUT, SEARCHED, fastest_layouts

    held = tuple(_field(name, SEARCHED) for name in wanted.held)
    open_fields = {*SEARCHED, *LEFT_OUT} - set(held)
    spec = load_open_spec(path, assignments, open_fields, {"nodes": wanted.nodes})
    if spec.is_script:
        raise CliError("workload.command: a script's model is its own; allowed with --search: none")
    device, machine = machine_of(spec, wanted.assumed)
    memory_bytes = _memory_bytes(device, wanted)
    on_gpu = device.reported_as != ""
    try:
        layouts = fastest_layouts(spec, machine, memory_bytes, held=held, on_gpu=on_gpu)
        problems = check(layouts.specs[0]) if layouts.specs else []
        if problems:
            raise SpecError(tuple(problems))
    except SpecError as error:
        raise CliError(describe_problems(path, error)) from error
    if not layouts.specs:
        raise CliError(_too_large(spec, layouts, memory_bytes))
    best = layouts.searched.found[0]
    return _Result(
        wanted=wanted,
        device=device,
        machine=machine,
        memory_bytes=memory_bytes,
        layouts=layouts,
        advice=advice(layouts.searched.found, layouts.by_micro_batch, machine.ranks_per_node),
        training=training(
            best.facts, best.step, machine, steps=spec.steps, price_per_hour=wanted.price
        ),
    )


def _field(text: str, searched: Sequence[str]) -> str:
    name = text.removeprefix("parallel.")
    if name not in searched:
        allowed = ", ".join(f"parallel.{each}" for each in searched)
        raise CliError(f"--hold {text!r}: is not a field that a search changes; allowed: {allowed}")
    return name


def _memory_bytes(device: Device, wanted: Wanted) -> float:
    from outlast.cli.errors import bad_input
    from outlast.devices import parse_quantity

    if wanted.memory:
        with bad_input("--memory: "):
            return parse_quantity(wanted.memory, "B")
    if device.memory_bytes is None:
        raise CliError(
            f"--memory: is required with --device {wanted.assumed.device}, whose memory is not "
            "known; allowed: bytes, such as 72G"
        )
    return _USABLE * device.memory_bytes


def _too_large(spec: JobSpec, layouts: Layouts, memory_bytes: float) -> str:
    least = layouts.searched.least_device_bytes
    return (
        f"none of {layouts.searched.num_candidates:,} layouts fits: on {spec.resources.nodes} "
        f"nodes of {spec.workers_per_node} a rank needs {size(least)} at least, and may use "
        f"{size(memory_bytes)}; allowed: more --nodes, a --device with more memory, or a smaller "
        "model.seq_len"
    )


def _facts(result: _Result) -> dict[str, Any]:
    from trainer.core.advice import terms

    wanted, searched = result.wanted, result.layouts.searched
    best = result.found[0]
    return {
        "nodes": wanted.nodes,
        "workers_per_node": result.machine.ranks_per_node,
        "device": result.device.name,
        "memory_bytes": result.memory_bytes,
        "kernel_share": result.machine.kernel_share,
        "link_bytes_per_s": result.machine.link_bytes_per_s,
        "latency_s": result.machine.latency_s,
        "candidates": searched.num_candidates,
        "projected": searched.num_projected,
        "layouts": [
            {
                "parallel": spec.parallel.model_dump(mode="json"),
                "device_bytes": one.device_bytes,
                "longer": one.step.step_s / best.step.step_s - 1,
                "terms_s": terms(one.step),
                **asdict(one.step),
            }
            for spec, one in _shown(result)
        ],
        "takeaways": [
            {"takeaway": each.takeaway, "follows": each.follows, "says": _advice(each, best)}
            for each in result.advice
        ],
        "training": asdict(result.training),
        **_section(result.best),
    }


def _shown(result: _Result) -> list[tuple[JobSpec, Found]]:
    pairs = list(zip(result.layouts.specs, result.found, strict=True))
    return pairs[: result.wanted.top]


def _section(spec: JobSpec) -> dict[str, Any]:
    """What the spec of a job has to say to be laid out so."""
    parallel = spec.parallel.model_dump(mode="json", exclude_defaults=True)
    degrees = {name: getattr(spec.parallel, name) for name in ("tp", "pp", "dp", "micro_batch")}
    resources = spec.resources.model_dump(mode="json", exclude_defaults=True)
    size = {"nodes": spec.resources.nodes, "workers_per_node": spec.workers_per_node}
    return {"parallel": {**degrees, **parallel}, "resources": {**size, **resources}}


def _print(result: _Result) -> None:
    import yaml

    searched, wanted = result.layouts.searched, result.wanted
    machine = result.machine
    usable = f"at most {size(result.memory_bytes)} of memory a rank"
    output.print_lines(
        [
            (
                "search",
                f"{searched.num_candidates:,} layouts of {result.best.layout.world_size:,} ranks "
                f"on {wanted.nodes:,} node(s) of {machine.ranks_per_node}; "
                f"{searched.num_projected:,} projected, {len(result.found)} meshes fit",
            ),
            (
                "on",
                f"{result.device.name}, {usable}, kernels at {100 * machine.kernel_share:.0f} %, "
                f"{1e6 * machine.latency_s:g} us a message",
            ),
        ]
    )
    print()
    rows = [_row(*each) for each in _shown(result)]
    if all(row["cp"] == "1" for row in rows):
        rows = [{name: row[name] for name in row if name != "cp"} for row in rows]
    output.print_table(tuple(rows[0]), [tuple(row.values()) for row in rows], empty="")
    print()
    best = result.found[0]
    output.print_lines(
        [
            ("step", _step(best)),
            *(("others", _against(one, best)) for _, one in _shown(result)[1:]),
            *(("takeaways", _advice(each, best)) for each in result.advice),
            *_training_lines(result),
        ]
    )
    print()
    print(yaml.safe_dump(_section(result.best), sort_keys=False), end="")


def _row(spec: JobSpec, one: Found) -> dict[str, str]:
    """A layout by the names of its columns."""
    parallel, step = spec.parallel, one.step
    chunks = str(parallel.virtual_stages)
    return {
        "tp": str(parallel.tp),
        "cp": str(parallel.cp),
        "pp": str(parallel.pp),
        "dp": str(parallel.dp),
        "micro": str(parallel.micro_batch),
        "chunks": parallel.schedule if one.facts.splits_backward else chunks,
        "recompute": parallel.recompute if isinstance(parallel.recompute, str) else "by layer",
        "ZeRO": str(parallel.zero.level),
        "step s": f"{step.step_s:.4g}",
        "MFU %": f"{100 * step.mfu_windowed:.1f}",
        "HFU %": f"{100 * step.hfu_windowed:.1f}",
        "memory": size(one.device_bytes),
    }


def _step(best: Found) -> str:
    from trainer.core.advice import terms

    step = best.step
    parts = [
        f"{_name(name, best)} {100 * seconds / step.step_s:.1f} %"
        for name, seconds in terms(step).items()
    ]
    return f"{step.step_s:.4g} s: {', '.join(parts)}"


def _name(term: str, *found: Found) -> str:
    """A term of the steps of these layouts, in words."""
    if term == "tp":
        return f"exposed {inside_layers(*(one.facts.layout for one in found))}"
    return f"exposed {term}" if term in ("pp", "dp") else term


def _against(one: Found, best: Found) -> str:
    layout = one.facts.layout
    words = f"{layout_in_words(layout)}: {_longer(one.step, best.step)}"
    return words + _why(one, best)


def _longer(step: Projection, best: Projection) -> str:
    share = 100 * (step.step_s / best.step_s - 1)
    return f"{abs(share):.1f} % {'longer' if share >= 0 else 'shorter'}"


def _why(one: Found, best: Found) -> str:
    """The terms of a step that make it another one than the best."""
    from trainer.core.advice import differences

    step_s = best.step.step_s
    parts = [
        f"{_name(name, one, best)} {100 * seconds / step_s:+.1f} %"
        for name, seconds in differences(best.step, one.step)[:_TERMS_SHOWN]
        if abs(seconds) > _LEAST_SHOWN * step_s
    ]
    return f" ({', '.join(parts)})" if parts else ""


# By `trainer.core.advice.Takeaway`.
_TAKEAWAYS = {
    "tensor_in_nodes": "tensor parallelism as wide as a node before a pipeline across nodes",
    "least_model_parallel": "the smallest tp x pp that fits, replicas for the rest",
    "micro_batch": "each size of micro-batch is tried",
}


def _advice(each: Advice, best: Found) -> str:
    """One takeaway of the paper, and what this search says of it."""
    says, other = _TAKEAWAYS[each.takeaway], each.other
    if other is None:
        return f"{says}: {'so it is' if each.follows else 'not so here'}"
    if each.follows:
        longer = f"{_longer(other.step, best.step)}{_why(other, best)}"
        return f"{says}: next is {other.facts.micro_batch}, {longer}"
    return f"{says}: not so here, {_against(other, best)}"


def _training_lines(result: _Result) -> list[tuple[str, str]]:
    training, steps = result.training, result.best.steps
    all_again = result.best.parallel.recompute in ("full", "offload")
    formula = "8TP/(nX)" if all_again else "6TP/(nX)"
    lines = [
        (
            "training",
            f"{steps:,} steps, {training.tokens:.4g} tokens: {duration(training.projected_s)} "
            f"projected, {duration(training.by_formula_s)} by {formula}, without faults",
        )
    ]
    if result.wanted.price:
        lines.append(
            (
                "cost",
                f"{training.price:,.2f} for {training.device_hours:,.0f} device-hours, "
                f"{training.price_per_million_tokens:.4g} per million tokens",
            )
        )
    return lines
