"""Every layout that a job could have on some nodes, and the fastest of them by projection.

Imports no torch. What a layout may be is decided by the rules of the job spec alone, how
long its step is by `trainer.core.projection`, and which are looked at by
`trainer.core.search`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from outlast.problems import FieldProblem, SpecError, closest, collect, divisors
from outlast.rules import elastic, layout
from outlast.sizing.of_spec import plan_input
from outlast.spec import JobSpec, ParallelSpec
from outlast.spec.models import ZeroSpec
from trainer.core.projection import Machine
from trainer.core.search import RECOMPUTES, Found, Searched, search

# What a search changes, unless it is held.
SEARCHED = (
    *("tp", "cp", "pp", "dp", "micro_batch", "virtual_stages"),
    *("schedule", "recompute", "zero", "tp_chunks", "context"),
)
# What is of one layout and no other: it is left out of a search.
LEFT_OUT = ("layer_split", "extra_warmup")
# Wider tensor groups than a node has ranks are looked at up to this width.
_WIDEST_TENSOR = 8
# Sequences are divided as long as a rank has so many tokens of one: with fewer, the blocks that
# travel take longer than the products beside them, and more tensor ranks spare as much memory.
_LEAST_TOKENS = 4096
# Of more pieces more hides, by the projection, and so it does as measured, up to here.
_CHUNKS = 8
_DPS_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """What a search found for a job."""

    specs: tuple[JobSpec, ...]
    """Of each mesh that fits the fastest, fastest first."""
    searched: Searched
    """The same as numbers."""
    by_micro_batch: tuple[Found, ...]
    """The fastest of the first mesh for each size of micro-batch, fastest first."""


def fastest_layouts(
    spec: JobSpec,
    machine: Machine,
    memory_bytes: float,
    *,
    held: Collection[str] = (),
    on_gpu: bool = True,
) -> Layouts:
    """The fastest use of each mesh that `spec` could have on its nodes.

    The spec says how many nodes of how many ranks there are, and what fields of `parallel` are
    that are not searched or `held`; its other ones are as good as not there. It has none of
    `LEFT_OUT`, which few of the layouts could have.

    Raises:
        SpecError: it can have no layout at all there.
    """
    specs = list(_candidates(spec, held))
    if not specs:
        raise SpecError(tuple(_why_none(spec, held)))
    facts = [plan_input(each, on_gpu=on_gpu) for each in specs]
    found = search(facts, machine, memory_bytes)
    if not found.found:
        return Layouts(specs=(), searched=found, by_micro_batch=())
    first = found.found[0].facts.layout
    same = [each for each in facts if each.layout == first]
    sizes = search(same, machine, memory_bytes, group=lambda each: each.micro_batch)
    return Layouts(
        specs=tuple(specs[one.index] for one in found.found),
        searched=found,
        by_micro_batch=sizes.found,
    )


def _candidates(spec: JobSpec, held: Collection[str]) -> Iterator[JobSpec]:
    """All that the rules of layouts allow, but those that another one is better than always."""
    for degrees in _meshes(spec, held):
        exchanges = _exchanges(spec.parallel, degrees["cp"], held)
        for changes in _uses(spec, degrees, held):
            for context in exchanges:
                update = {**degrees, **changes, "context": context}
                other = spec.model_copy(
                    update={"parallel": spec.parallel.model_copy(update=update)}
                )
                if not collect((*layout.RULES, elastic.check), other):
                    yield other
                    break


def _meshes(spec: JobSpec, held: Collection[str]) -> Iterator[dict[str, int]]:
    parallel, world = spec.parallel, _num_ranks(spec)
    widest = max(spec.workers_per_node, _WIDEST_TENSOR)
    for tp in _degrees("tp", parallel, held, divisors(world)):
        if world % tp or (tp > widest and "tp" not in held):
            continue
        for cp, pp in product(
            _degrees("cp", parallel, held, _context_degrees(spec, world // tp)),
            _degrees("pp", parallel, held, divisors(world // tp)),
        ):
            dp, rest = divmod(world, tp * cp * pp)
            if pp > spec.model.layers or rest or spec.data.global_batch % dp:
                continue
            if "dp" in held and dp != parallel.dp:
                continue
            yield {"tp": tp, "cp": cp, "pp": pp, "dp": dp}


def _context_degrees(spec: JobSpec, num_ranks: int) -> list[int]:
    """Into how many parts sequences may be divided."""
    most = max(1, spec.model.seq_len // _LEAST_TOKENS)
    return [each for each in divisors(num_ranks) if each <= most]


def _uses(
    spec: JobSpec, degrees: dict[str, int], held: Collection[str]
) -> Iterator[dict[str, Any]]:
    """What else a layout of these degrees may be."""
    parallel = spec.parallel
    sizes = divisors(spec.data.global_batch // degrees["dp"])
    modes = [parallel.recompute] if "recompute" in held else RECOMPUTES
    for micro_batch, stages, mode, zero in product(
        _degrees("micro_batch", parallel, held, sizes),
        _stages(spec, degrees["pp"], held),
        modes,
        _zeros(parallel, degrees, held),
    ):
        num_micro_batches = spec.data.global_batch // degrees["dp"] // micro_batch
        if _is_idle_v(stages, num_micro_batches, degrees["pp"]) and "schedule" not in held:
            continue
        changes = {"micro_batch": micro_batch, **stages, "recompute": mode, "zero": zero}
        if "tp_chunks" not in held and degrees["tp"] > 1:
            changes["tp_chunks"] = _CHUNKS
        yield changes


def _exchanges(parallel: ParallelSpec, cp: int, held: Collection[str]) -> list[str]:
    """What ranks that divide a sequence send each other: rings where heads do not divide, as what
    has a mask there has no kernel, which no projection knows."""
    return [parallel.context] if "context" in held or cp == 1 else ["all_to_all", "ring"]


def _stages(spec: JobSpec, pp: int, held: Collection[str]) -> list[dict[str, Any]]:
    """Schedules with their virtual stages. GPipe waits as long as 1F1B and keeps more."""
    parallel, layers = spec.parallel, spec.model.layers
    plain = [parallel.schedule] if "schedule" in held else ["1f1b"]
    if pp > 1 and "schedule" not in held:
        plain.append("zb-h1")
    found: list[dict[str, Any]] = [{"schedule": each, "virtual_stages": 1} for each in plain]
    if layers % pp == 0 and pp > 1:
        found += [
            {"schedule": "interleaved", "virtual_stages": chunks}
            for chunks in divisors(layers // pp)[1:]
        ]
    if pp > 1 and layers >= 2 * pp:
        found.append({"schedule": "zb-v", "virtual_stages": 2})
    return [
        each
        for each in found
        if all(
            name not in held or each[name] == getattr(parallel, name)
            for name in ("schedule", "virtual_stages")
        )
    ]


def _is_idle_v(stages: Mapping[str, Any], num_micro_batches: int, pp: int) -> bool:
    """Whether ZB-V waits as long as ZB-H1, than which it then has more messages alone."""
    return stages["schedule"] == "zb-v" and num_micro_batches <= pp


def _zeros(
    parallel: ParallelSpec, degrees: dict[str, int], held: Collection[str]
) -> list[ZeroSpec]:
    """Levels 2 and 3 spare nothing beyond 1 unless they share after each micro-batch."""
    if "zero" in held:
        return [parallel.zero]
    if degrees["dp"] * degrees["cp"] == 1:
        return [ZeroSpec()]
    # That is what they do where there is no pipeline.
    each = {} if degrees["pp"] == 1 else {"reduce_after": "micro_batch"}
    dropped = {} if degrees["pp"] == 1 else {"reshard_after": "micro_batch"}
    sent = {"communication": parallel.zero.communication}
    return [
        ZeroSpec.model_validate({"level": level, **sent, **when})
        for level, when in enumerate(({}, {}, each, {**each, **dropped}))
    ]


def _degrees(
    name: str, parallel: ParallelSpec, held: Collection[str], wanted: Sequence[int]
) -> Sequence[int]:
    return [getattr(parallel, name)] if name in held else wanted


def _num_ranks(spec: JobSpec) -> int:
    return (spec.resources.nodes or 1) * spec.workers_per_node


def _why_none(spec: JobSpec, held: Collection[str]) -> list[FieldProblem]:
    """Which field keeps all layouts from being one."""
    batch, world = spec.data.global_batch, _num_ranks(spec)
    meshes = list(_meshes(spec.model_copy(update={"data": _any_batch(spec)}), held))
    if not meshes:
        names = [f"parallel.{name}" for name in ("tp", "cp", "pp", "dp") if name in held]
        message = (
            f"cannot be held on {world} ranks; allowed: degrees whose product divides them, and pp "
            f"at most model.layers = {spec.model.layers}"
        )
        return [FieldProblem(field=" and ".join(names), message=message)]
    replicas = sorted({each["dp"] for each in meshes})
    if all(batch % dp for dp in replicas):
        near = ", ".join(map(str, closest(replicas, batch, _DPS_SHOWN)))
        message = (
            f"is {batch}, which no number of replicas that {world} ranks could be divides; "
            f"allowed: multiples of one of {{{near}}}"
        )
        return [FieldProblem(field="data.global_batch", message=message)]
    return _problems(spec, held)


def _any_batch(spec: JobSpec) -> Any:
    """A batch that all replicas divide."""
    return spec.data.model_copy(update={"global_batch": _num_ranks(spec)})


def _problems(spec: JobSpec, held: Collection[str]) -> list[FieldProblem]:
    """Of the layout with the fewest of them."""
    fewest: list[FieldProblem] = []
    for degrees in _meshes(spec, held):
        for changes in _uses(spec, degrees, held):
            other = spec.model_copy(
                update={"parallel": spec.parallel.model_copy(update={**degrees, **changes})}
            )
            problems = collect((*layout.RULES, elastic.check), other)
            if not fewest or len(problems) < len(fewest):
                fewest = problems
    return fewest
