"""A plan in words: what `outlast plan` prints for people, and what it warns of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from outlast.cli import output
from outlast.cli.describe import flops, size
from outlast.cli.plan_facts import recommended_standbys

if TYPE_CHECKING:
    from outlast.cli.plan_facts import Projected
    from outlast.cli.specfile import Checked
    from outlast.layout import Layout
    from outlast.spec import JobSpec, ParallelSpec
    from trainer.core.estimate import Plan
    from trainer.core.memory import RankMemory
    from trainer.core.projection import Projection

# More groups than this tell a person nothing that the first ones do not.
_MAX_GROUPS = 8
# A deep pipeline's stages are alike but for the first and the last ones.
_MAX_STAGES = 8
_Item = TypeVar("_Item")
# Above this a pipeline idles more than a larger batch or another schedule would cost.
_LARGE_BUBBLE = 0.25
# From so many chunks on interleaving waits no longer than ZB-V.
_CHUNKS_OF_V = 6


def print_plan(
    read: Checked, found: Plan, projected: Projected | None, *, fit: tuple[str, list[str]]
) -> None:
    """The plan for people; `fit` says how nodes that are there fit the job, with warnings."""
    spec = read.spec
    output.print_lines([*_job_lines(spec), *_work_lines(spec, found), *_waiting_lines(spec, found)])
    output.print_lines([("data", line) for line in data_lines(read)])
    print("\nmemory of one rank")
    _print_memory(found.ranks)
    print()
    output.print_lines([*_host_lines(spec, found), ("connected nodes", fit[0])])
    if projected is not None:
        print(f"\non {projected.device.name}")
        output.print_lines(_projection_lines(spec, projected))
    for line in (*warnings(spec, found, projected), *read.seen.warnings, *fit[1]):
        print()
        output.print_wrapped(f"warning: {line}")


def data_lines(read: Checked) -> list[str]:
    """Where tokens come from as far as it can be seen here, and what is left out of them."""
    lines = list(read.resolved)
    source = read.seen.source
    if source is not None:
        lines.append(f"{source.num_tokens:,} tokens of {source.name}")
        lines += source.left_out()
    return lines


def warnings(spec: JobSpec, found: Plan, projected: Projected | None) -> list[str]:
    """What will not fit, or will be slow for no good reason."""
    from outlast.sizing.of_spec import offloaded_layers

    parallel = spec.parallel
    lines = []
    memory = None if projected is None else projected.device.memory_bytes
    largest = max(found.ranks, key=lambda rank: rank.device_bytes)
    if memory is not None and largest.device_bytes > memory:
        lines.append(
            f"a rank of stage {largest.stage} needs {size(largest.device_bytes)}, more than the "
            f"{size(memory)} of the device: {_what_would_help(spec, largest)}"
        )
    # A micro-batch goes through the stages twice where the pipeline folds.
    filling = parallel.pp * (2 if parallel.folds else 1)
    if parallel.pp > 1 and found.num_micro_batches < filling:
        least = filling * parallel.dp * parallel.micro_batch
        lines.append(
            f"{found.num_micro_batches} micro-batches do not fill {parallel.pp} stages: "
            f"{100 * found.bubble:.0f} % of a step is bubble; data.global_batch = {least} or more "
            "would fill them"
        )
    elif found.bubble > _LARGE_BUBBLE:
        lines.append(
            f"{100 * found.bubble:.0f} % of a step is bubble: more micro-batches"
            f"{_shorter_schedules(parallel)} make it smaller"
        )
    if parallel.tp > spec.workers_per_node:
        lines.append(
            f"a tensor group of {parallel.tp} ranks spans nodes of {spec.workers_per_node}: the "
            "most talkative messages cross the network"
        )
    if offloaded_layers(spec) and spec.resources.device == "cpu":
        lines.append("parallel.recompute offload copies, and spares nothing: CPUs have host memory")
    if parallel.zero.level > 0 and spec.layout.dp == 1:
        lines.append(f"parallel.zero.level {parallel.zero.level} has one replica, nothing to share")
    return lines


def _shorter_schedules(parallel: ParallelSpec) -> str:
    """Those that wait less than the job's own, of which interleaving waits a chunk's share."""
    if parallel.folds:
        return ""
    if parallel.virtual_stages > 1:
        has_less = parallel.virtual_stages < _CHUNKS_OF_V
        return ", more virtual stages or the schedule zb-v" if has_less else ""
    if parallel.schedule == "zb-h1":
        return " or the schedule zb-v"
    return " or the schedules interleaved, zb-h1 or zb-v"


def _what_would_help(spec: JobSpec, rank: RankMemory) -> str:
    """The knobs of the largest part."""
    state = rank.weights_bytes + rank.gradients_bytes + rank.optimizer_bytes
    if state < rank.activations_bytes:
        return "a smaller parallel.micro_batch, parallel.recompute or more parallel.tp or cp"
    if spec.layout.dp > 1 and spec.parallel.zero.level < 3:
        return f"parallel.zero.level {spec.parallel.zero.level + 1}, more parallel.tp or pp"
    return "more parallel.tp, parallel.pp or, with ZeRO, parallel.dp"


def layout_in_words(layout: Layout) -> str:
    """A layout in words; dp is the number of replicas, whatever ranks each has."""
    context = f"cp {layout.cp} x " if layout.cp > 1 else ""
    return f"tp {layout.tp} x {context}pp {layout.pp} x dp {layout.num_replicas}"


def inside_layers(*layouts: Layout) -> str:
    """Whose messages go within a layer in any of these layouts: one term of a step has them all."""
    degrees = {
        "tp": max(each.tp for each in layouts),
        "cp": max(each.cp for each in layouts),
        "experts": max(each.ep for each in layouts),
    }
    return "+".join(name for name, degree in degrees.items() if degree > 1) or "tp"


def _job_lines(spec: JobSpec) -> list[tuple[str, str]]:
    layout, parallel = spec.layout, spec.parallel
    sequence = "on" if parallel.sequence_parallel and layout.tp > 1 else "off"
    modes = parallel.recompute
    recompute = modes if isinstance(modes, str) else "by layer"
    return [
        ("job", f"{spec.name}: {spec.steps:,} steps, {spec.precision}, seed {spec.seed}"),
        (
            "layout",
            f"{layout_in_words(layout)} = {layout.world_size} ranks on "
            f"{spec.num_nodes} node(s) of {spec.workers_per_node}; sequence parallel "
            f"{sequence}, ZeRO {parallel.zero.level}, recompute {recompute}",
        ),
        (
            "standbys",
            f"{recommended_standbys(spec)} would do on 99 of 100 days at Llama 3's failure rate; "
            f"the spec has {spec.resources.standby}",
        ),
        ("groups", _groups("tp", layout.tp_groups())),
        ("groups", _groups("dp", layout.dp_groups())),
        ("groups", _groups("pp", layout.pp_groups())),
        *([("groups", _groups("cp", layout.cp_groups()))] if layout.cp > 1 else []),
        *([("groups", _groups("ep", layout.ep_groups()))] if layout.ep > 1 else []),
    ]


def _work_lines(spec: JobSpec, found: Plan) -> list[tuple[str, str]]:
    per_token = found.flops_per_token
    per_step = per_token * found.tokens_per_step
    layers = found.chunk_layers
    # Chunks alike are counted, others listed.
    stages = f"{len(layers)} x {layers[0]}" if len(set(layers)) == 1 else _joined(layers)
    again = found.recomputed_flops_per_token
    recompute = f"; recompute adds {100 * again / per_token:.0f} %" if again else ""
    return [
        ("stages", f"{stages} transformer blocks"),
        ("parameters", f"{found.parameters:,}"),
        (
            "batch",
            f"{found.tokens_per_step:,} tokens a step in {found.num_micro_batches} "
            f"micro-batches of {spec.parallel.micro_batch} sequence(s) per replica",
        ),
        (
            "compute",
            f"{flops(per_token)} a token, {flops(per_step)} a step, "
            f"{flops(per_step * spec.steps)} in all{recompute}",
        ),
        ("", f"{flops(found.full_flops_per_token)} a token where full attention is counted"),
    ]


def _waiting_lines(spec: JobSpec, found: Plan) -> list[tuple[str, str]]:
    communication = found.communication
    parts = f"cp {size(communication.cp_bytes)}, " if communication.cp_bytes else ""
    experts = f"experts {size(communication.ep_bytes)}, " if communication.ep_bytes else ""
    return [
        (
            "bubble",
            f"{100 * found.bubble:.1f} % of a step ({spec.parallel.schedule}); micro-batches in "
            f"flight by stage: {_joined(found.peak_in_flight, ', ')}",
        ),
        (
            "traffic",
            f"{size(communication.total_bytes)} sent per step by the busiest rank: "
            f"tp {size(communication.tp_bytes)}, dp {size(communication.dp_bytes)}, "
            f"pp {size(communication.pp_bytes)}, {parts}{experts}"
            f"tied embedding {size(communication.embedding_bytes)}",
        ),
    ]


# Side by side they fit a terminal of 80 columns; more are a line each, which is longer.
MAX_STAGES_BESIDE = 4


def _print_memory(ranks: tuple[RankMemory, ...]) -> None:
    header = (
        *("stage", "parameters", "weights", "gradients", "optimizer", "activations"),
        *("buffers", "working", "device total", "host checkpoints"),
    )
    rows = _shortened([_rank_row(rank) for rank in ranks], tuple("..." for _ in header))
    if len(rows) > MAX_STAGES_BESIDE:
        output.print_table(header, rows, empty="")
        return
    first, *rest = zip(header, *rows, strict=True)
    output.print_table(first, rest, empty="")


def _rank_row(rank: RankMemory) -> tuple[str, ...]:
    return (
        str(rank.stage),
        f"{rank.parameters:,}",
        size(rank.weights_bytes),
        size(rank.gradients_bytes),
        size(rank.optimizer_bytes),
        size(rank.activations_bytes),
        size(rank.buffers_bytes),
        size(rank.working_bytes),
        size(rank.device_bytes),
        size(rank.host_slots_bytes),
    )


def _host_lines(spec: JobSpec, found: Plan) -> list[tuple[str, str]]:
    from checkpoint.sizing import node_host_memory_bytes

    ranks = f"on a node of {spec.workers_per_node} rank(s)"
    lines = [f"{size(node_host_memory_bytes(spec))} of tmpfs {ranks}, for checkpoints"]
    kept = max(rank.host_activations_bytes for rank in found.ranks)
    if kept:
        lines.append(f"{size(spec.workers_per_node * kept)} {ranks}, for inputs of blocks")
    return [("host memory", line) for line in lines]


def _projection_lines(spec: JobSpec, projected: Projected) -> list[tuple[str, str]]:
    step, device = projected.step, projected.device
    return [
        (
            "assumed",
            f"{flops(projected.peak_flops_per_s)}/s in {spec.precision} ({device.source}), of "
            f"which products reach {100 * projected.kernel_share:.0f} %; link "
            f"{_speed(projected.link_bytes_per_s)}{_links_inside(spec, projected)}; "
            f"{1e6 * projected.latency_s:g} us a message",
        ),
        (
            "step",
            f"{step.step_s:.3g} s: compute {step.compute_s:.3g}, bubble {step.bubble_s:.3g}, "
            f"exposed {inside_layers(spec.layout)} {step.tp_exposed_s:.3g}, "
            f"pp {step.pp_exposed_s:.3g}, dp {step.dp_exposed_s:.3g}",
        ),
        ("speed", f"{step.tokens_per_s:,.0f} tokens/s"),
        (
            "MFU",
            f"{100 * step.mfu_windowed:.1f} % (attention as masked), "
            f"{100 * step.mfu_full:.1f} % (full attention counted)",
        ),
        *_hardware_line(step),
    ]


def _hardware_line(step: Projection) -> list[tuple[str, str]]:
    """The same as MFU where nothing is computed a second time."""
    if not step.recompute_s:
        return []
    text = f"{100 * step.hfu_windowed:.1f} % and {100 * step.hfu_full:.1f} %, recompute counted too"
    return [("HFU", text)]


def _links_inside(spec: JobSpec, projected: Projected) -> str:
    """Which dimensions stay inside nodes and use their faster links."""
    layout, step = spec.layout, projected.step
    speeds = {
        name: speed
        for name, degree, speed in (
            ("tp", layout.tp, step.tp_bytes_per_s),
            ("pp", layout.pp, step.pp_bytes_per_s),
            ("dp", layout.dp, step.dp_bytes_per_s),
            ("cp", layout.cp, step.cp_bytes_per_s),
            ("experts", layout.ep, step.ep_bytes_per_s),
        )
        # A dimension of one sends nothing.
        if degree > 1 and speed != projected.link_bytes_per_s
    }
    if not speeds:
        return ""
    return f", {_speed(max(speeds.values()))} inside a node ({', '.join(speeds)})"


def _groups(kind: str, groups: tuple[tuple[int, ...], ...]) -> str:
    shown = " ".join(f"[{' '.join(str(rank) for rank in group)}]" for group in groups[:_MAX_GROUPS])
    more = f" and {len(groups) - _MAX_GROUPS} more" if len(groups) > _MAX_GROUPS else ""
    return f"{kind} {shown}{more}"


def _joined(numbers: tuple[int, ...], between: str = " + ") -> str:
    return between.join(_shortened([str(number) for number in numbers], "..."))


def _shortened(items: Sequence[_Item], gap: _Item) -> list[_Item]:
    """The first and the last of many."""
    if len(items) <= 2 * _MAX_STAGES:
        return list(items)
    return [*items[:_MAX_STAGES], gap, *items[-_MAX_STAGES:]]


def _speed(bytes_per_s: float) -> str:
    """Links are sold in decimal units."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"
