"""Joined pairs have the bytes of one that was written at once, and need no more memory for it."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlast.tokens import index, join, writer
from outlast.tokens.index import MAGIC, read_index, write_index
from outlast.tokens.join import join_pairs
from outlast.tokens.writer import TokenWriter

# Of a document the number of tokens in each of its sequences.
Document = tuple[int, ...]
_DOCUMENTS = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple).filter(any), max_size=9
)
_CODES = {"uint16": 8, "int32": 4}


def write(name: Path, documents: Sequence[Document], token_type: str, first: int) -> int:
    """A pair whose ids count from `first`; gives the next one."""
    made = TokenWriter(name, token_type)
    for lengths in documents:
        made.add(*(np.arange(first, first := first + length) for length in lengths))
    made.close()
    return first


def index_in_memory(documents: Sequence[Document], token_type: str) -> bytes:
    """An index by the format's description, all of it at once."""
    lengths = np.array([length for each in documents for length in each], dtype="<i4")
    places = (np.cumsum(lengths, dtype="<i8") - lengths) * np.dtype(token_type).itemsize
    firsts = np.cumsum([0, *map(len, documents)], dtype="<i8")
    header = struct.pack("<9sQBQQ", MAGIC, 1, _CODES[token_type], len(lengths), len(documents) + 1)
    return header + lengths.tobytes() + places.tobytes() + firsts.tobytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parts=st.lists(_DOCUMENTS, min_size=1, max_size=5),
    token_type=st.sampled_from(["uint16", "int32"]),
    at_a_time=st.integers(1, 7),
)
def test_joined_pairs_are_those_that_were_written_at_once(
    tmp_path: Path, parts: list[list[Document]], token_type: str, at_a_time: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "STREAM_NUMBERS", at_a_time)
        patch.setattr(writer, "_NUMBERS_HELD", at_a_time)
        patch.setattr(writer, "STREAM_NUMBERS", at_a_time)
        first, pairs = 0, [tmp_path / str(number) for number in range(len(parts))]
        for pair, documents in zip(pairs, parts, strict=True):
            first = write(pair, documents, token_type, first)
        together = [each for documents in parts for each in documents]
        write(tmp_path / "once", together, token_type, 0)
        has_any = join_pairs(pairs, tmp_path / "joined", token_type)
    assert has_any == bool(together)
    assert (tmp_path / "once.idx").read_bytes() == index_in_memory(together, token_type)
    if has_any:
        for ending in (".bin", ".idx"):
            joined, once = (tmp_path / f"{name}{ending}" for name in ("joined", "once"))
            assert joined.read_bytes() == once.read_bytes()
    # Nothing is left of what a writer keeps on the way.
    assert {path.suffix for path in tmp_path.iterdir()} == {".bin", ".idx"}


def pair_of(name: Path, num_documents: int) -> Path:
    """Documents of one token each, without any memory for them."""

    def ones() -> list[np.ndarray]:
        return [np.ones(1000, dtype="<i4")] * (num_documents // 1000)

    write_index(
        name.with_name(f"{name.name}.idx"),
        token_type="uint16",
        num_sequences=num_documents,
        num_documents=num_documents,
        lengths=ones,
        documents=(np.arange(at, at + 1000) for at in range(0, num_documents, 1000)),
    )
    with name.with_name(f"{name.name}.bin").open("wb") as file:
        file.truncate(2 * num_documents)
    return name


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that were allocated while it ran."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_of_joining_does_not_grow_with_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STREAM_NUMBERS", "_NUM_CHECKED"):
        monkeypatch.setattr(index, name, 1 << 12)
    monkeypatch.setattr(join, "_COPY_BYTES", 1 << 12)
    peaks = []
    # The first one is for what Python keeps once.
    for num_documents in (20_000, 20_000, 2_000_000):
        pairs = [pair_of(tmp_path / str(number), num_documents) for number in range(2)]
        peaks.append(peak_of(partial(join_pairs, pairs, tmp_path / "joined", "uint16")))
        assert read_index(tmp_path / "joined.idx").num_documents == 2 * num_documents
    assert peaks[2] < peaks[1] + 4096


def test_memory_of_writing_does_not_grow_with_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_NUMBERS_HELD", 1 << 12)
    for module in (index, writer):
        monkeypatch.setattr(module, "STREAM_NUMBERS", 1 << 12)
    peaks, token = [], np.array([7])

    def written(num_documents: int) -> None:
        made = TokenWriter(tmp_path / "a", "uint16")
        for _ in range(num_documents):
            made.add(token)
        made.close()

    for num_documents in (10_000, 10_000, 100_000):
        peaks.append(peak_of(partial(written, num_documents)))
        assert read_index(tmp_path / "a.idx").num_documents == num_documents
    assert peaks[2] < peaks[1] + 4096


@pytest.mark.parametrize("num_more", [0, 1, 9])
def test_a_writer_begins_at_a_mark_and_drops_what_is_behind(tmp_path: Path, num_more: int) -> None:
    documents = [np.arange(number, 2 * number + 1) for number in range(20)]
    whole, first = (TokenWriter(tmp_path / name, "uint16") for name in ("whole", "cut"))
    for number, document in enumerate(documents[: 10 + num_more]):
        whole.add(document)
        first.add(document)
        if number == 9:
            first.add_piece(np.array([7, 8]))
            mark = first.mark()
            first.end_document()
    whole.close()
    # Numbers of another document are in all files of the killed one.
    first.mark()
    first.abandon()
    assert mark.is_held_by(tmp_path / "cut", "uint16")
    again = TokenWriter(tmp_path / "cut", "uint16", mark)
    again.end_document()
    for document in documents[10 : 10 + num_more]:
        again.add(document)
    again.close()
    found = read_index(tmp_path / "cut.idx")
    expected = read_index(tmp_path / "whole.idx").lengths.tolist()
    assert found.lengths.tolist() == [*expected[:10], 2, *expected[10:]]
    assert found.documents.tolist() == list(range(12 + num_more))
    tokens = [*documents[:10], [7, 8], *documents[10 : 10 + num_more]]
    assert np.array_equal(np.fromfile(tmp_path / "cut.bin", dtype="<u2"), np.concatenate(tokens))


def test_joining_what_is_damaged_is_refused(tmp_path: Path) -> None:
    pairs = [pair_of(tmp_path / str(number), 3000) for number in range(2)]
    content = (tmp_path / "1.idx").read_bytes()
    (tmp_path / "1.idx").write_bytes(content[:-5])
    with pytest.raises(ValueError, match=r"1\.idx is truncated"):
        join_pairs(pairs, tmp_path / "joined", "uint16")
