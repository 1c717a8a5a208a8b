"""Megatron's index format, checked with files that Megatron's own code wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outlast.tokens.index import TokenWriter, read_index

# Written by IndexedDatasetBuilder of megatron-core 0.16.0: three documents of one sequence, and one
# of two. The same release read what `TokenWriter` writes, and wrote the same bytes for the same
# documents.
MEGATRON = Path(__file__).parent / "megatron" / "megatron_core_0_16"
DOCUMENTS = [[1, 2, 3], [50000, 4], [7, 7, 7, 7, 7]]


def test_what_megatron_wrote_is_read_with_its_documents() -> None:
    index = read_index(MEGATRON.with_suffix(".idx"))
    assert index.token_type == "uint16"
    assert index.num_documents == 4
    assert index.documents.tolist() == [0, 1, 2, 3, 5]
    assert index.lengths.tolist() == [3, 2, 5, 1, 3]
    assert index.num_bytes == MEGATRON.with_suffix(".bin").stat().st_size


def test_what_we_write_has_the_bytes_of_megatrons(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "ours", "uint16")
    for document in DOCUMENTS:
        writer.add(np.array(document))
    writer.close()
    theirs = MEGATRON.with_suffix(".bin").read_bytes()
    assert (tmp_path / "ours.bin").read_bytes() == theirs[: 2 * 10]
    index, other = read_index(tmp_path / "ours.idx"), read_index(MEGATRON.with_suffix(".idx"))
    assert index.lengths.tolist() == other.lengths[:3].tolist()
    assert index.places.tolist() == other.places[:3].tolist()
    assert index.documents.tolist() == other.documents[:4].tolist()


@pytest.mark.parametrize("size", [0, 5, 20, 34, 100])
def test_a_truncated_index_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.idx"
    path.write_bytes(MEGATRON.with_suffix(".idx").read_bytes()[:size])
    with pytest.raises(ValueError, match=r"cut\.idx is (truncated|no index of tokens)"):
        read_index(path)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, b"PK", "is no index of tokens"),
        (9, b"\2", "is an index of version 2"),
        (17, b"\7", "tokens are float32; allowed: uint8, int8, int16, int32, int64, uint16"),
        (17, b"\x09", "of the unknown type 9"),
        (18, b"\4", "has 12 bytes more than its header says"),
        (34, b"\4", "do not lie one after the other"),
        (54, b"\2", "are not all of its sequences"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, at: int, value: bytes, why: str) -> None:
    content = bytearray(MEGATRON.with_suffix(".idx").read_bytes())
    content[at : at + len(value)] = value
    path = tmp_path / "damaged.idx"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        read_index(path)


def test_a_mode_for_each_sequence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pictures.idx"
    path.write_bytes(MEGATRON.with_suffix(".idx").read_bytes() + bytes(5))
    with pytest.raises(ValueError, match="multimodal data is not read"):
        read_index(path)
