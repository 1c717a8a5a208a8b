"""Plans of ranks that do not talk to each other fit together, whatever the two layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.core.manifest import Manifest
from checkpoint.core.reading import Unit, plan_reading
from checkpoint.core.strided import Box, StridedRange, strided_ranges
from checkpoint.core.tiles import Tiles, Wanted
from checkpoint.errors import CorruptCheckpointError, LayoutMismatchError
from tests.checkpoint.layouts import Cut, checkpoint_of, content, cuts

few = settings(max_examples=150, deadline=None)
sizes = st.sampled_from((1, 200, 10_000))
DENSE = Cut(tp=1, pp=1, dp=1, sharded=False, split=(4,))


def plans_of(manifest: Manifest, wanted: list[list[Wanted]], unit_bytes: int) -> list[list[Unit]]:
    tiles = Tiles(manifest)
    return [
        list(plan_reading(tiles, wanted, rank, unit_bytes=unit_bytes))
        for rank in range(len(wanted))
    ]


def copy(source: bytes, target: bytearray, span: StridedRange) -> None:
    for row in range(span.count):
        first, at = (
            span.source + row * span.source_stride,
            span.target + row * span.target_stride,
        )
        assert at + span.run <= len(target)
        target[at : at + span.run] = source[first : first + span.run]


def fill(
    rank: int, plan: list[Unit], wanted: list[Wanted], payloads: list[bytes]
) -> list[Counter[int]]:
    """Do what a plan says; how often each byte of each tensor was written."""
    targets = [bytearray(len(content(tensor))) for tensor in wanted]
    written = [Counter[int]() for _ in wanted]
    for unit in plan:
        raw = payloads[unit.part][unit.start : unit.end]
        pieces = unit.pieces(rank)
        if unit.reader != rank:
            message = unit.message(rank)
            body = bytearray(message.nbytes)
            if message.packing:
                for span in message.packing:
                    copy(raw, body, span)
            else:
                body[:] = raw[message.start : message.start + message.nbytes]
            raw, pieces = bytes(body), message.pieces
        for index, span in pieces:
            copy(raw, targets[index], span)
            for row in range(span.count):
                at = span.target + row * span.target_stride
                written[index].update(range(at, at + span.run))
    for tensor, target in zip(wanted, targets, strict=True):
        assert bytes(target) == content(tensor), tensor
    return written


@few
@given(cuts(), cuts(), st.booleans(), st.sampled_from((16, 64, 100, 4096)), sizes)
def test_every_wanted_byte_is_written_once_from_the_right_place(
    saved: Cut, loaded: Cut, redundant: bool, block_bytes: int, unit_bytes: int
) -> None:
    manifest, payloads = checkpoint_of(saved, block_bytes=block_bytes, redundant=redundant)
    wanted = [loaded.held_by(rank) for rank in range(loaded.size)]
    plans = plans_of(manifest, wanted, unit_bytes)
    for rank, plan in enumerate(plans):
        for tensor, written in zip(
            wanted[rank], fill(rank, plan, wanted[rank], payloads), strict=True
        ):
            assert set(written.values()) <= {1}
            assert len(written) == len(content(tensor))


@few
@given(cuts(), cuts(), st.booleans(), st.sampled_from((16, 64, 100, 4096)), sizes)
def test_ranks_plan_alike_and_every_block_is_read_once(
    saved: Cut, loaded: Cut, redundant: bool, block_bytes: int, unit_bytes: int
) -> None:
    """Each rank's own plan: the same unit is the same to all who take part in it."""
    manifest, _ = checkpoint_of(saved, block_bytes=block_bytes, redundant=redundant)
    wanted = [loaded.held_by(rank) for rank in range(loaded.size)]
    plans = plans_of(manifest, wanted, unit_bytes)
    facts: dict[int, tuple[object, ...]] = {}
    takers: dict[int, list[int]] = {}
    for rank, plan in enumerate(plans):
        order = [(unit.round, unit.part, unit.first_block) for unit in plan]
        assert all(one < other for one, other in pairwise(order))
        for unit in plan:
            same = (unit.part, unit.start, unit.end, unit.reader, unit.round, unit.circle)
            assert facts.setdefault(unit.number, same) == same
            takers.setdefault(unit.number, []).append(rank)
            for peer in unit.others:
                assert 0 < unit.message(peer).nbytes <= unit.end - unit.start
    read = Counter[tuple[int, int]]()
    for number, (part, start, end, reader, _, circle) in facts.items():
        assert takers[number] == list(circle)
        assert reader in circle
        assert end - start <= max(unit_bytes, block_bytes)
        read.update((part, byte) for byte in range(start, end))
    assert set(read.values()) == {1}
    assert len(read) == sum(part.nbytes for part in manifest.parts)


@few
@given(cuts(), st.integers(2, 6))
def test_replicas_share_the_reading(saved: Cut, num_replicas: int) -> None:
    """Ranks that want the same read the same number of blocks, give or take one a circle."""
    manifest, _ = checkpoint_of(saved, block_bytes=16)
    wanted = [DENSE.held_by(0)] * num_replicas
    plan = plans_of(manifest, wanted, 1)[0]
    # Blocks without a tensor's byte are dealt out by their number.
    shares = Counter(unit.reader for unit in plan if unit.copies)
    assert max(shares.values()) - min(shares.values()) <= 1


def test_replicas_of_a_rectangle_are_read_from_parts_in_turn() -> None:
    """Four replicas saved all they had: no part gives more than its share."""
    saved = Cut(tp=1, pp=1, dp=4, sharded=False, split=(4,))
    manifest, _ = checkpoint_of(saved, block_bytes=64, redundant=True)
    given_bytes = [0] * 4
    for part, tiles in Tiles(manifest).by_part.items():
        given_bytes[part] = sum(tile.tensor.nbytes for tile in tiles)
    assert max(given_bytes) - min(given_bytes) <= max(
        tensor.nbytes for tensor in manifest.parts[0].tensors
    )


def boxes_in(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    spans = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape]
    return st.tuples(*spans).map(
        lambda found: Box(
            offsets=tuple(first for first, _ in found),
            shape=tuple(last - first for first, last in found),
        )
    )


@few
@given(st.data())
def test_strips_and_their_cuts_are_what_two_rectangles_share(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4).map(tuple))
    source, target = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    start, end = sorted(data.draw(st.tuples(st.integers(0, 900), st.integers(0, 900))))

    def place(box: Box, index: tuple[int, ...]) -> int:
        position = 0
        for at, offset, size in zip(index, box.offsets, box.shape, strict=True):
            position = position * size + at - offset
        return position

    shared = source.shared(target)
    expected = set()
    if shared is not None:
        for number in range(shared.size):
            index, left = [], number
            for size, offset in zip(reversed(shared.shape), reversed(shared.offsets), strict=True):
                index.append(offset + left % size)
                left //= size
            item = tuple(reversed(index))
            for byte in range(2):
                at = 10 + 2 * place(source, item) + byte
                if start <= at < end:
                    expected.add((at, 2 * place(target, item) + byte))
    found = [
        (
            piece.source + row * piece.source_stride + byte,
            piece.target + row * piece.target_stride + byte,
        )
        for span in strided_ranges(source, target, item_bytes=2, source_at=10)
        for piece in span.cut(start, end)
        for row in range(piece.count)
        for byte in range(piece.run)
    ]
    assert sorted(found) == sorted(expected)


def test_parts_that_leave_a_gap_are_corrupt() -> None:
    manifest, _ = checkpoint_of(Cut(tp=2, pp=1, dp=1, sharded=False, split=(4,)), block_bytes=64)
    first = replace(manifest.parts[0], num_parts=1)
    halved = Manifest(step=3, attempt=1, world_size=2, parts=(first,))
    with pytest.raises(CorruptCheckpointError, match=r"parts hold \d+ of \d+ elements of"):
        Tiles(halved)


def test_rectangles_missing_from_all_ranks_are_another_model() -> None:
    manifest, _ = checkpoint_of(DENSE, block_bytes=64)
    wanted = [tensor for tensor in DENSE.held_by(0) if tensor.name != "2.norm"]
    with pytest.raises(
        LayoutMismatchError, match=r"holds 1 tensors that this model has not.*2.norm"
    ):
        plan_reading(Tiles(manifest), [wanted], 0)
