"""What a node has and what a job needs of each of its nodes, and what is missing between them.

A job that asks for more than a node has is no fault of the node: see `misfit`. A node whose
agent does not say what it has is taken to fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outlast.sizing.describe import in_words, told_apart

_GIB = 1 << 30
# Machines of one model differ by what their kernels keep for themselves.
_ALIKE = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a node has, as its agent found it when it joined; 0 is unknown but for GPUs."""

    gpus: int = 0
    # Of the first GPU; a node's GPUs are alike.
    gpu_model: str = ""
    gpu_memory_bytes: int = 0
    cpus: int = 0
    # What processes here may use: the machine's, or less where a cgroup limits them.
    memory_bytes: int = 0
    # The most that host-memory checkpoints can take, and what was free when it joined.
    host_memory_bytes: int = 0
    host_memory_free_bytes: int = 0
    # The job's image that its agent runs in, "" for the image of the agents.
    image: str = ""
    # Where it stands, such as "block-1/rack-7"; "" where nobody says that.
    topology: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeed:
    """What a job needs of each node besides worker places."""

    gpus: int = 0
    host_memory_bytes: int = 0
    # Its own; "" where it runs in the image of the agents.
    image: str = ""


NOTHING_NEEDED = NodeNeed()


def image_of(capacity: Capacity | None) -> str:
    """The job's image that a node runs; "" for that of the agents."""
    return "" if capacity is None else capacity.image


def image_in_words(image: str) -> str:
    """An image of a job, or the one that all agents have."""
    return f"the image {image}" if image else "the image of the agents"


def lacking(need: NodeNeed, capacity: Capacity | None) -> str:
    """What a node lacks for a job, in words; "" when nothing is known to be missing."""
    if need.image != (known_image := image_of(capacity)):
        return f"needs {image_in_words(need.image)} and runs {image_in_words(known_image)}"
    if capacity is None:
        return ""
    missing = []
    if capacity.gpus < need.gpus:
        missing.append(f"needs {need.gpus} GPUs and has {capacity.gpus}")
    if 0 < capacity.host_memory_bytes < need.host_memory_bytes:
        needed, most = told_apart(need.host_memory_bytes, capacity.host_memory_bytes)
        missing.append(f"needs {needed} of host memory for checkpoints and can hold {most}")
    return "; ".join(missing)


def is_no_larger(one: Capacity | None, other: Capacity | None) -> bool:
    """Whether a node has at most what another has: where that does not fit, this does not either.

    Free memory is left out, as it changes.
    """
    if one is None or other is None or one.image != other.image:
        return False
    return all(
        mine <= _ALIKE * theirs
        for mine, theirs in (
            (one.gpus, other.gpus),
            (one.gpu_memory_bytes, other.gpu_memory_bytes),
            (one.memory_bytes, other.memory_bytes),
            (one.host_memory_bytes, other.host_memory_bytes),
        )
    )


def need_in_words(workers: int, need: NodeNeed) -> str:
    """What each node of a job must have, in words."""
    parts = [f"{workers} worker place{'' if workers == 1 else 's'}"]
    if need.gpus:
        parts.append(f"{need.gpus} GPU{'' if need.gpus == 1 else 's'}")
    if need.host_memory_bytes >= _GIB // 10:
        parts.append(f"{in_words(need.host_memory_bytes)} of host memory")
    if need.image:
        parts.append(image_in_words(need.image))
    return _listed(parts)


def capacities_in_words(found: Iterable[tuple[int, Capacity | None]]) -> str:
    """What nodes (worker places, capacity) have, those that are alike together."""
    counts: dict[str, int] = {}
    for workers, capacity in found:
        text = _in_words(workers, capacity)
        counts[text] = counts.get(text, 0) + 1
    most = sorted(counts.items(), key=lambda item: -item[1])
    shown = [f"{count} node{'' if count == 1 else 's'}: {text}" for text, count in most[:3]]
    if len(most) > len(shown):
        rest = sum(count for _, count in most[len(shown) :])
        shown.append(f"and {rest} others")
    return "; ".join(shown)


def _in_words(workers: int, capacity: Capacity | None) -> str:
    places = f"{workers} worker place{'' if workers == 1 else 's'}"
    if capacity is None:
        return f"{places}, and its agent does not say what else it has"
    parts = [places, f"{capacity.gpus} GPU{'' if capacity.gpus == 1 else 's'}"]
    if capacity.gpus and capacity.gpu_model:
        memory = f" of {in_words(capacity.gpu_memory_bytes)}" if capacity.gpu_memory_bytes else ""
        parts[-1] += f" ({capacity.gpu_model}{memory})"
    if capacity.memory_bytes:
        parts.append(f"{in_words(capacity.memory_bytes)} of memory")
    if capacity.host_memory_bytes and capacity.host_memory_bytes != capacity.memory_bytes:
        parts.append(f"{in_words(capacity.host_memory_bytes)} of it for checkpoints")
    if capacity.cpus:
        parts.append(f"{capacity.cpus} CPU{'' if capacity.cpus == 1 else 's'}")
    if capacity.image:
        parts.append(image_in_words(capacity.image))
    return ", ".join(parts)


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
