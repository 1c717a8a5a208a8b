"""Megatron's index format, checked with Megatron's own code and with files that it wrote."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from outlast.tokens.files import open_source
from outlast.tokens.index import read_index
from outlast.tokens.join import join_pairs
from outlast.tokens.writer import TokenWriter

# Written by IndexedDatasetBuilder of megatron-core 0.16.0: three documents of one sequence, and one
# of two.
MEGATRON = Path(__file__).parent / "megatron" / "megatron_core_0_16"
DOCUMENTS = [[1, 2, 3], [50000, 4], [7, 7, 7, 7, 7]]


@pytest.fixture(scope="module")
def megatron() -> ModuleType:
    """Megatron's module; its package warns of accelerators' libraries that are not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("megatron.core.datasets.indexed_dataset")


def documents_of(token_type: str) -> list[np.ndarray]:
    """Some empty, one long, with the smallest and the largest id of the type."""
    most = np.iinfo(token_type).max
    lengths = [3, 1, 0, 5_000, 2]
    random = np.random.default_rng(7)
    return [
        np.append(random.integers(0, most, max(length - 1, 0)), [most][:length])
        for length in lengths
    ]


@pytest.mark.parametrize("token_type", ["uint16", "int32"])
def test_megatron_reads_what_we_write(
    megatron: ModuleType, tmp_path: Path, token_type: str
) -> None:
    documents = documents_of(token_type)
    writer = TokenWriter(tmp_path / "ours", token_type)
    for document in documents:
        writer.add(document)
    writer.close()
    read = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert read.index.dtype == np.dtype(token_type)
    assert read.document_indices.tolist() == list(range(len(documents) + 1))
    assert len(read) == len(documents)
    for number, document in enumerate(documents):
        assert read[number].tolist() == document.tolist()
    assert read.get(3, offset=4_000, length=10).tolist() == documents[3][4_000:4_010].tolist()


@pytest.mark.parametrize("token_type", ["uint16", "int32", "int64"])
def test_we_read_what_megatron_writes(
    megatron: ModuleType, tmp_path: Path, token_type: str
) -> None:
    """Documents of one sequence and of several."""
    documents = [documents_of("uint16")[:2], documents_of("uint16")[3:], [np.array([7])]]
    theirs = megatron.IndexedDatasetBuilder(
        str(tmp_path / "theirs.bin"), dtype=np.dtype(token_type).type
    )
    for sequences in documents:
        joined = torch.from_numpy(np.concatenate(sequences).astype(np.int64))
        theirs.add_document(joined, [len(each) for each in sequences])
    theirs.finalize(str(tmp_path / "theirs.idx"))
    index = read_index(tmp_path / "theirs.idx")
    assert index.token_type == token_type
    assert index.num_documents == len(documents)
    tokens = open_source(str(tmp_path / "theirs")).train.tokens()
    expected = np.concatenate([np.concatenate(each) for each in documents])
    assert tokens[:].tolist() == expected.tolist()


def test_both_write_the_same_bytes(megatron: ModuleType, tmp_path: Path) -> None:
    documents = documents_of("uint16")
    writer = TokenWriter(tmp_path / "ours", "uint16")
    theirs = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in documents:
        writer.add(document)
        theirs.add_document(torch.from_numpy(document), [len(document)])
    writer.close()
    theirs.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        ours = (tmp_path / "ours").with_suffix(suffix).read_bytes()
        assert ours == (tmp_path / "theirs").with_suffix(suffix).read_bytes()


def test_megatron_reads_what_we_join(megatron: ModuleType, tmp_path: Path) -> None:
    documents, pairs = documents_of("int32"), [tmp_path / name for name in ("a", "b", "c")]
    for pair, few in zip(pairs, (documents[:2], [], documents[2:]), strict=True):
        writer = TokenWriter(pair, "int32")
        for document in few:
            writer.add(document)
        writer.close()
    assert join_pairs(pairs, tmp_path / "ours", "int32")
    read = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert read.document_indices.tolist() == list(range(len(documents) + 1))
    assert [read[number].tolist() for number in range(5)] == [each.tolist() for each in documents]


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


@pytest.mark.parametrize("id", [-1, 2**16])
def test_an_id_beyond_the_type_is_refused(tmp_path: Path, id: int) -> None:
    writer = TokenWriter(tmp_path / "a", "uint16")
    with pytest.raises(ValueError, match="allowed in uint16: 0 to 65535"):
        writer.add(np.array([5, id]))
    writer.close()


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
