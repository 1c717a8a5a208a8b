"""Which of the ranks that hold the same bytes writes them to storage.

Replicas hold the same state when nothing is sharded over them, the ranks of a tensor
group the same norms, the first and the last stage the same tied embedding. Each such
rectangle has one owner, so that a checkpoint holds every byte once and all ranks upload
about as much. A rank finds what it owns by itself: those it shares with hold the same
list of tensors, in the same order and of the same sizes, and come to the same result.

What does not belong here: what a tensor is (`shards.py`), and who is in which group.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkpoint.core.shards import ShardTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """How many ranks of a group hold the same, and which of them this one is."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"copy {self.index} is not in 0..{self.count - 1}")


# A group in which nobody else holds the same.
ALONE = Copies()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rectangle that this rank holds, and in which groups others hold it too."""

    nbytes: int
    over_tensor_group: bool = False
    tied: bool = False
    """Whether the first and the last stage have a copy each."""


def owned(
    held: Sequence[Held],
    *,
    replicas: Copies = ALONE,
    tensor_group: Copies = ALONE,
    ends: Copies = ALONE,
) -> tuple[bool, ...]:
    """Whether this rank owns each rectangle of `held`.

    `replicas` hold all of them alike, the tensor group only some, `ends` the tied ones.
    Shares differ by no more than the largest rectangle within a stage.
    """
    ours = _of_this_end(held, ends)
    mine = [False] * len(held)
    # First what fewer ranks can take. Every tensor rank has as much of it, so one of them
    # stands for all; the rest then levels what this leaves.
    loads = [0] * replicas.count
    queue = [(0, replica) for replica in range(replicas.count)]
    for item in _largest_first(held, ours, over_tensor_group=False):
        load, replica = heapq.heappop(queue)
        loads[replica] = load + held[item].nbytes
        heapq.heappush(queue, (loads[replica], replica))
        mine[item] = replica == replicas.index
    all_ranks = [
        (load, replica, rank)
        for replica, load in enumerate(loads)
        for rank in range(tensor_group.count)
    ]
    heapq.heapify(all_ranks)
    for item in _largest_first(held, ours, over_tensor_group=True):
        load, replica, rank = heapq.heappop(all_ranks)
        heapq.heappush(all_ranks, (load + held[item].nbytes, replica, rank))
        mine[item] = (replica, rank) == (replicas.index, tensor_group.index)
    return tuple(mine)


def check_owned_once(tensors: Iterable[ShardTensor]) -> None:
    """Raise ValueError unless these rectangles make up whole tensors, none there twice.

    A sum of sizes, not a proof: rectangles that overlap in part and leave an equal gap pass.
    """
    num_items: dict[tuple[str, str, tuple[int, ...]], int] = defaultdict(int)
    seen = set()
    for tensor in tensors:
        if (tensor.name, tensor.offsets) in seen:
            raise ValueError(f"tensor {tensor.name} at {tensor.offsets} has two owners")
        seen.add((tensor.name, tensor.offsets))
        num_items[(tensor.name, tensor.dtype, tensor.global_shape)] += math.prod(tensor.shape)
    for (name, dtype, shape), found in num_items.items():
        if found != math.prod(shape):
            raise ValueError(
                f"tensor {name}: {found} of {math.prod(shape)} items of {dtype} {shape} are there"
            )


def _of_this_end(held: Sequence[Held], ends: Copies) -> list[int]:
    """Indices of what this end of the pipeline saves: tied rectangles take turns."""
    tied = [index for index, one in enumerate(held) if one.tied]
    elsewhere = {index for turn, index in enumerate(tied) if turn % ends.count != ends.index}
    return [index for index in range(len(held)) if index not in elsewhere]


def _largest_first(
    held: Sequence[Held], among: Iterable[int], *, over_tensor_group: bool
) -> list[int]:
    chosen = [index for index in among if held[index].over_tensor_group is over_tensor_group]
    # Sorting keeps the order of equals, which is the same on every rank.
    return sorted(chosen, key=lambda index: -held[index].nbytes)
