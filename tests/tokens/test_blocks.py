"""Blocks of a file and what makes room for others, against what one would do byte by byte."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outlast.remote.blocks import KeptFile, bytes_of, pieces, to_evict

SIZES = st.integers(0, 300)
BLOCKS = st.integers(1, 40)


@given(size=SIZES, ends=st.tuples(SIZES, SIZES), block_bytes=BLOCKS)
def test_pieces_put_together_are_the_range(
    size: int, ends: tuple[int, int], block_bytes: int
) -> None:
    content = bytes(place % 251 for place in range(size))
    start, end = min(ends), min(max(ends), size)
    found = b""
    for piece in pieces(start, end, block_bytes=block_bytes):
        first, last = bytes_of(piece.block, size=size, block_bytes=block_bytes)
        found += content[first:last][piece.start : piece.end]
    assert found == content[start:end]


@given(start=SIZES, length=SIZES, block_bytes=BLOCKS)
def test_no_block_is_read_that_is_not_needed_and_none_twice(
    start: int, length: int, block_bytes: int
) -> None:
    blocks = [piece.block for piece in pieces(start, start + length, block_bytes=block_bytes)]
    assert blocks == sorted({place // block_bytes for place in range(start, start + length)})


@given(size=st.integers(1, 300), block_bytes=BLOCKS)
def test_blocks_are_the_whole_file(size: int, block_bytes: int) -> None:
    number = -(-size // block_bytes)
    spans = [bytes_of(each, size=size, block_bytes=block_bytes) for each in range(number)]
    assert [place for span in spans for place in range(*span)] == list(range(size))


KEPT = st.lists(
    st.builds(
        KeptFile,
        name=st.uuids().map(str),
        nbytes=st.integers(0, 20),
        used_at_ns=st.integers(0, 5),
    ),
    max_size=12,
    unique_by=lambda each: each.name,
)


@given(kept=KEPT, limit_bytes=st.integers(-5, 150))
def test_evicting_is_deleting_the_oldest_until_the_others_fit(
    kept: list[KeptFile], limit_bytes: int
) -> None:
    left, deleted = list(kept), []
    while left and sum(each.nbytes for each in left) > limit_bytes:
        deleted.append(min(left, key=lambda each: (each.used_at_ns, each.name)))
        left.remove(deleted[-1])
    assert to_evict(kept, limit_bytes=limit_bytes) == deleted
