"""Every rectangle that several ranks hold alike is saved by one of them, and shares are even."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.core.ownership import ALONE, Copies, Held, check_owned_once, owned
from checkpoint.core.shards import Rectangle, ShardTensor, lay_out

few = settings(max_examples=150, deadline=None)

helds = st.builds(Held, nbytes=st.integers(0, 50), over_tensor_group=st.booleans())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What each rank of a pipeline stage holds, and how many there are."""

    held: tuple[Held, ...]
    num_replicas: int
    tensor_size: int

    def owners(self, ends: Copies = ALONE) -> dict[tuple[int, int], tuple[bool, ...]]:
        """What each rank finds that it owns, by replica and tensor rank."""
        return {
            (replica, rank): owned(
                self.held,
                replicas=Copies(index=replica, count=self.num_replicas),
                tensor_group=Copies(index=rank, count=self.tensor_size),
                ends=ends,
            )
            for replica in range(self.num_replicas)
            for rank in range(self.tensor_size)
        }


stages = st.builds(
    Stage,
    held=st.lists(helds, max_size=12).map(tuple),
    num_replicas=st.integers(1, 5),
    tensor_size=st.integers(1, 4),
)


def times_saved(stage: Stage, owners: dict[tuple[int, int], tuple[bool, ...]]) -> Counter[object]:
    """How often each distinct rectangle of a stage is saved."""
    return Counter(
        # A shard of another tensor rank is another rectangle.
        (item, None if stage.held[item].over_tensor_group else rank)
        for (_, rank), mine in owners.items()
        for item, is_mine in enumerate(mine)
        if is_mine
    )


def distinct(stage: Stage) -> set[object]:
    return {
        (item, None if one.over_tensor_group else rank)
        for item, one in enumerate(stage.held)
        for rank in range(stage.tensor_size)
    }


@few
@given(stages)
def test_each_distinct_rectangle_is_owned_exactly_once(stage: Stage) -> None:
    assert times_saved(stage, stage.owners()) == dict.fromkeys(distinct(stage), 1)


@few
@given(stages)
def test_shares_differ_by_no_more_than_the_largest_rectangle(stage: Stage) -> None:
    shares = [
        sum(one.nbytes for one, is_mine in zip(stage.held, mine, strict=True) if is_mine)
        for mine in stage.owners().values()
    ]
    largest = max((one.nbytes for one in stage.held), default=0)
    assert max(shares) - min(shares) <= largest


@few
@given(stages, stages, st.integers(0, 5))
def test_what_both_ends_hold_is_saved_at_one_of_them(
    first: Stage, last: Stage, num_tied: int
) -> None:
    """Both ends list their copies in one order, whatever else they hold."""
    tied = tuple(Held(nbytes=7 * number, tied=True) for number in range(num_tied))
    last = replace(last, num_replicas=first.num_replicas, tensor_size=first.tensor_size)
    saved: Counter[object] = Counter()
    for index, stage in enumerate((first, last)):
        own = len(stage.held)
        whole = replace(stage, held=(*stage.held, *tied))
        owners = whole.owners(Copies(index=index, count=2))
        for (item, rank), times in times_saved(whole, owners).items():
            saved[("tied", item - own, rank) if item >= own else (index, item, rank)] += times
    ends = {(index, *each) for index, stage in enumerate((first, last)) for each in distinct(stage)}
    copies = {
        ("tied", number, rank) for number in range(num_tied) for rank in range(first.tensor_size)
    }
    assert saved == dict.fromkeys(ends | copies, 1)


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match="copy 2 is not in"):
        Copies(index=2, count=2)


def pieces(*rows: tuple[int, int], name: str = "w") -> tuple[ShardTensor, ...]:
    """Some rows of a tensor of eight."""
    return lay_out(
        0,
        1,
        [
            Rectangle(
                name=name,
                dtype="float32",
                global_shape=(8, 2),
                offsets=(start, 0),
                shape=(stop - start, 2),
                nbytes=8 * (stop - start),
            )
            for start, stop in rows
        ],
    ).tensors


def test_whole_tensors_pass() -> None:
    check_owned_once((*pieces((0, 5)), *pieces((0, 8), name="v"), *pieces((5, 8))))


def test_a_gap_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tensor w: 10 of 16 items"):
        check_owned_once(pieces((0, 2), (5, 8)))


def test_two_owners_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tensor w at \(0, 0\) has two owners"):
        check_owned_once((*pieces((0, 4)), *pieces((0, 4))))
