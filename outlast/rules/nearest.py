"""The layouts nearest to one that cannot work.

Few enough candidates that all can be tried: tensor and pipeline degrees up to twice the
wanted ones, replicas that keep the number of ranks or stand next to the wanted number, and
micro-batches no larger than the wanted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

from outlast.rules import layout

if TYPE_CHECKING:
    from outlast.spec import JobSpec, ParallelSpec

# More would not help a person choose.
NUM_SHOWN = 3
# Layouts of equal size come first: another number of ranks is another cluster.
_COST_OF_WORLD = 4.0


def nearest_layouts(spec: JobSpec) -> list[str]:
    """In words, nearest first; none where something else than the layout must change."""
    wanted = spec.parallel
    ranked = sorted(_candidates(spec), key=lambda candidate: _distance(wanted, candidate))
    found: list[str] = []
    for parallel in ranked:
        words = _in_words(wanted, parallel)
        if words not in found and not layout.check(spec.model_copy(update={"parallel": parallel})):
            found.append(words)
        if len(found) == NUM_SHOWN:
            break
    return found


def _candidates(spec: JobSpec) -> Iterator[ParallelSpec]:
    parallel = spec.parallel
    world = spec.layout.world_size
    sizes = [spec.model.heads, spec.model.num_kv_heads, spec.model.mlp_hidden]
    degrees = [tp for tp in range(1, 2 * parallel.tp + 1) if all(n % tp == 0 for n in sizes)]
    stages = range(1, min(2 * parallel.pp, spec.model.layers) + 1)
    for tp, pp, micro_batch in product(degrees, stages, _divisors(parallel.micro_batch)):
        near = _neighbours(parallel.dp, spec.data.global_batch // micro_batch)
        for dp in {world // (tp * pp), *near} - {0}:
            changes = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": micro_batch}
            yield from _variants(parallel, changes)


def _variants(parallel: ParallelSpec, degrees: dict[str, int]) -> Iterator[ParallelSpec]:
    """With what else is wanted, without its list of layers, and with plain 1F1B."""
    yield parallel.model_copy(update=degrees)
    without = {"layer_split": None, **degrees}
    yield parallel.model_copy(update=without)
    if parallel.schedule == "interleaved" or parallel.virtual_stages > 1:
        yield parallel.model_copy(update={**without, "schedule": "1f1b", "virtual_stages": 1})


def _distance(wanted: ParallelSpec, found: ParallelSpec) -> float:
    """Doublings between two layouts, the number of ranks counted most."""

    def doublings(one: int, other: int) -> float:
        return abs(math.log2(one / other))

    ranks = doublings(found.tp * found.pp * found.dp, wanted.tp * wanted.pp * wanted.dp)
    degrees = sum(
        doublings(getattr(found, name), getattr(wanted, name))
        for name in ("tp", "pp", "dp", "micro_batch", "virtual_stages")
    )
    changes = (found.schedule != wanted.schedule) + (found.layer_split != wanted.layer_split)
    return _COST_OF_WORLD * ranks + degrees + changes


def _in_words(wanted: ParallelSpec, found: ParallelSpec) -> str:
    words = f"tp {found.tp}, pp {found.pp}, dp {found.dp}"
    for name in ("micro_batch", "virtual_stages", "schedule"):
        if getattr(found, name) != getattr(wanted, name):
            words += f", {name} {getattr(found, name)}"
    if found.layer_split != wanted.layer_split:
        words += ", no layer_split"
    return words


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _neighbours(wanted: int, number: int) -> list[int]:
    """The divisors of `number` next to `wanted`, below and above."""
    below = [n for n in range(1, wanted + 1) if number % n == 0]
    above = next((n for n in range(wanted, number + 1) if number % n == 0), None)
    return [*below[-1:], *([above] if above is not None else [])]
