"""The layouts nearest to one that cannot work.

Few enough candidates that all can be tried, however large the numbers: for each degree a
handful next to the wanted one. Tensor degrees divide what they split, replicas keep the number
of ranks or stand next to the wanted number, micro-batches divide the wanted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from outlast.problems import FieldProblem, closest, collect, divisors, doublings
from outlast.rules import elastic, layout, model

if TYPE_CHECKING:
    from outlast.spec import JobSpec, ParallelSpec

    Rule: TypeAlias = Callable[[JobSpec], list[FieldProblem]]

# More would not help a person choose.
NUM_SHOWN = 3
# Layouts of equal size come first: another number of ranks is another cluster.
_COST_OF_WORLD = 4.0
_NUM_TRIED = 8


def nearest_layouts(spec: JobSpec, rules: Sequence[Rule]) -> list[str]:
    """In words, nearest first; none where something else than the layout must change.

    A layout is offered when every problem that is left with it is one that the spec has in
    any layout, and none of these is the model's: with another model others would work.
    """
    if collect(model.RULES, spec):
        return []
    wanted, before = spec.parallel, collect(rules, spec)
    whatever = {problem.field for problem in before} - _fields_of_layouts(spec)
    ranked = sorted(_candidates(spec), key=lambda candidate: _distance(wanted, candidate))
    found: list[str] = []
    for parallel in ranked:
        words = _in_words(wanted, parallel)
        if words not in found and _works(spec, parallel, rules, whatever):
            found.append(words)
        if len(found) == NUM_SHOWN:
            break
    return found


def _fields_of_layouts(spec: JobSpec) -> set[str]:
    return {problem.field for problem in layout.check(spec)}


def _works(
    spec: JobSpec, parallel: ParallelSpec, rules: Sequence[Rule], whatever: Collection[str]
) -> bool:
    other = spec.model_copy(update={"parallel": parallel})
    # Those of the layout first: most candidates fail them.
    if layout.check(other) or elastic.check(other):
        return False
    return all(problem.field in whatever for problem in collect(rules, other))


def _candidates(spec: JobSpec) -> Iterator[ParallelSpec]:
    parallel = spec.parallel
    world = spec.layout.world_size
    split = math.gcd(spec.model.heads, spec.model.mlp_hidden)
    degrees = closest(divisors(split), parallel.tp, _NUM_TRIED)
    stages = _stages(parallel.pp, spec.model.layers)
    micro_batches = closest(divisors(parallel.micro_batch), parallel.micro_batch, _NUM_TRIED)
    contexts = closest(divisors(parallel.cp), parallel.cp, _NUM_TRIED)
    for tp, cp, pp, micro_batch in product(degrees, contexts, stages, micro_batches):
        near = _neighbours(parallel.dp, spec.data.global_batch // micro_batch)
        for dp in {world // (tp * cp * pp), *near} - {0}:
            changes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "micro_batch": micro_batch}
            yield from _variants(parallel, changes)


def _variants(parallel: ParallelSpec, degrees: dict[str, int]) -> Iterator[ParallelSpec]:
    """With what else is wanted, without its list of layers, and with plain 1F1B."""
    if parallel.folds:
        yield parallel.model_copy(update={**degrees, "virtual_stages": 2})
    yield parallel.model_copy(update=degrees)
    without = {"layer_split": None, **degrees}
    yield parallel.model_copy(update=without)
    if parallel.schedule in ("interleaved", "zb-h1", "zb-v") or parallel.virtual_stages > 1:
        yield parallel.model_copy(update={**without, "schedule": "1f1b", "virtual_stages": 1})


def _distance(wanted: ParallelSpec, found: ParallelSpec) -> float:
    """Doublings between two layouts, the number of ranks counted most."""
    ranks = doublings(
        found.tp * found.cp * found.pp * found.dp, wanted.tp * wanted.cp * wanted.pp * wanted.dp
    )
    degrees = sum(
        doublings(getattr(found, name), getattr(wanted, name))
        for name in ("tp", "cp", "pp", "dp", "micro_batch", "virtual_stages")
    )
    changes = (found.schedule != wanted.schedule) + (found.layer_split != wanted.layer_split)
    return _COST_OF_WORLD * ranks + degrees + changes


def _in_words(wanted: ParallelSpec, found: ParallelSpec) -> str:
    words = f"tp {found.tp}, pp {found.pp}, dp {found.dp}"
    if wanted.cp > 1:
        words += f", cp {found.cp}"
    for name in ("micro_batch", "virtual_stages", "schedule"):
        if getattr(found, name) != getattr(wanted, name):
            words += f", {name} {getattr(found, name)}"
    if found.layer_split != wanted.layer_split:
        words += ", no layer_split"
    return words


def _stages(wanted: int, layers: int) -> list[int]:
    """Numbers of stages that `layers` can fill: those beside `wanted`, and its divisors."""
    last = min(wanted + _NUM_TRIED // 2, layers)
    beside = range(max(1, last - _NUM_TRIED), last + 1)
    fewer = [n for n in divisors(wanted) if n <= layers]
    return sorted({*beside, *closest(fewer, wanted, _NUM_TRIED)})


def _neighbours(wanted: int, number: int) -> list[int]:
    """The divisors of `number` next to `wanted`, below and above."""
    if number < 1:
        return []
    found = divisors(number)
    below = [n for n in found if n <= wanted]
    above = [n for n in found if n >= wanted]
    return [*below[-1:], *above[:1]]
