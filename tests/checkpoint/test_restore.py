from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpoint.errors import (
    CorruptCheckpointError,
    LayoutMismatchError,
    StorageUnavailableError,
)
from checkpoint.restore import load_storage
from checkpoint.storage import Storage
from tests.checkpoint.conftest import both_stores
from tests.checkpoint.helpers import (
    DEADLINE_S,
    ThreadGroup,
    commit_steps,
    load_alone,
    make_stager,
    make_tensors,
    same_bits,
    uploading,
)


def load_together(
    storage: Storage, step: int, size: int
) -> list[dict[str, object] | BaseException]:
    """What every rank of a group gets, or raises."""
    group = ThreadGroup(size)
    wanted = make_tensors(step)

    def load(rank: int) -> dict[str, object] | BaseException:
        tensors = make_tensors(99)
        try:
            extra = load_storage(
                storage, step, tensors, is_reader=rank == 0, broadcast=group.broadcast_of(rank)
            )
        except (CorruptCheckpointError, StorageUnavailableError, LayoutMismatchError) as error:
            return error
        assert same_bits(tensors, wanted)
        return extra

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(load, range(size)))


@contextmanager
def damaged(path: Path, content: bytes | None) -> Iterator[None]:
    """The file with other content, or without it, for a while."""
    before = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def test_one_rank_reads_and_its_replicas_get_the_same_bits(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [4])
    assert load_together(Storage(url), 4, 3) == [{"step": 4}] * 3


@both_stores
def test_checkpoint_in_many_blocks_is_read_bitwise(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks end in the middle of tensors; tensors span several blocks."""
    monkeypatch.setattr("checkpoint.upload.BLOCK_BYTES", 37)
    commit_steps(url, tmp_path / "memory", [4])
    assert load_together(Storage(url), 4, 2) == [{"step": 4}] * 2
    _, manifest = Storage(url).read_commit(4)
    assert len(manifest.parts[0].blocks) > 5


def test_damage_to_any_file_of_a_checkpoint_is_found_and_named(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [4])
    storage = Storage(url)
    root = tmp_path / "store/job-1"
    wanted = make_tensors(4)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    assert [str(path.relative_to(root)) for path in files] == [
        "commits/00000004.json",
        "step-00000004.1/.metadata",
        "step-00000004.1/__0_0.distcp",
        "step-00000004.1/manifest.json",
    ]
    for path in files:
        raw = path.read_bytes()
        # A sample that meets every field and tensor; records are covered byte by byte elsewhere.
        stride = max(1, len(raw) // 90)
        changes: list[bytes | None] = [None, b"", raw[:-1], raw + b"x", raw[: len(raw) // 2]]
        for at in range(0, len(raw), stride):
            changes.append(raw[:at] + bytes([raw[at] ^ 0x01]) + raw[at + 1 :])
        for change in changes:
            with damaged(path, change):
                tensors = make_tensors(99)
                with pytest.raises(CorruptCheckpointError) as caught:
                    load_alone(storage, 4, tensors)
                assert caught.value.step == 4
                assert str(path.relative_to(root)) in str(caught.value)
    tensors = make_tensors(99)
    load_alone(storage, 4, tensors)
    assert same_bits(tensors, wanted)


def test_corruption_is_the_same_verdict_on_every_rank_and_an_older_step_loads(
    url: str, tmp_path: Path
) -> None:
    commit_steps(url, tmp_path / "memory", [4, 8])
    storage = Storage(url)
    payload = tmp_path / "store/job-1/step-00000008.1/__0_0.distcp"
    raw = bytearray(payload.read_bytes())
    raw[10] ^= 0x10
    payload.write_bytes(raw)

    verdicts = load_together(storage, 8, 3)
    assert {type(verdict) for verdict in verdicts} == {CorruptCheckpointError}
    assert len({str(verdict) for verdict in verdicts}) == 1
    assert "step-00000008.1/__0_0.distcp: bytes 0 to" in str(verdicts[0])
    assert storage.committed_steps() == [8, 4]
    assert load_together(storage, 4, 3) == [{"step": 4}] * 3


def test_corruption_after_the_first_block_is_found_too(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoint.upload.BLOCK_BYTES", 64)
    commit_steps(url, tmp_path / "memory", [8])
    payload = tmp_path / "store/job-1/step-00000008.1/__0_0.distcp"
    raw = bytearray(payload.read_bytes())
    raw[-1] ^= 0x10
    payload.write_bytes(raw)
    verdicts = load_together(Storage(url), 8, 2)
    assert {type(verdict) for verdict in verdicts} == {CorruptCheckpointError}


def test_bad_transfer_is_read_again_before_it_is_called_corruption(
    url: str, tmp_path: Path
) -> None:
    commit_steps(url, tmp_path / "memory", [4])
    storage = Storage(url)
    read_range = storage.read_range
    reads: list[int] = []

    def flaky(path: str, start: int, end: int) -> bytes:
        reads.append(start)
        good = read_range(path, start, end)
        return good if len(reads) > 1 else bytes(len(good))

    storage.read_range = flaky  # type: ignore[method-assign]  # a cable, not a class
    tensors = make_tensors(99)
    load_alone(storage, 4, tensors)
    assert same_bits(tensors, make_tensors(4))
    assert reads == [0, 0]


def test_storage_that_fails_is_not_called_corruption(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [4])
    storage = Storage(url)
    storage.close()
    verdicts = load_together(storage, 4, 2)
    assert {type(verdict) for verdict in verdicts} == {StorageUnavailableError}


def test_other_layout_is_refused_with_the_first_tensor_that_differs(
    url: str, tmp_path: Path
) -> None:
    commit_steps(url, tmp_path / "memory", [4])
    with pytest.raises(LayoutMismatchError, match=r"1 of 7 tensors, first model.weight"):
        load_alone(Storage(url), 4, make_tensors(4, width=16))


def test_each_rank_finds_its_own_shards(url: str, tmp_path: Path) -> None:
    stagers = []
    for rank in (0, 1):
        tensors = make_tensors(6, rank=rank, ranks=2)
        stagers.append(make_stager(tmp_path / "memory", tensors, rank=rank, world_size=2))
    with uploading(url, tmp_path / "memory", local=(0, 1), savers=(0, 1)) as (uploader, news):
        for rank, stager in enumerate(stagers):
            stager.save(6, {"rank": rank}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
        assert news.committed == [6]
    shutil.rmtree(tmp_path / "memory")
    for rank in (0, 1):
        tensors = make_tensors(99, rank=rank, ranks=2)
        load_alone(Storage(url), 6, tensors)
        assert same_bits(tensors, make_tensors(6, rank=rank, ranks=2))


def test_every_byte_leaves_the_store_once(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [4])
    storage = Storage(url)
    read_range = storage.read_range
    num_read: list[int] = []

    def counted(path: str, start: int, end: int) -> bytes:
        num_read.append(end - start)
        return read_range(path, start, end)

    storage.read_range = counted  # type: ignore[method-assign]  # a meter on the real one
    load_together(storage, 4, 4)
    _, manifest = storage.read_commit(4)
    assert sum(num_read) == manifest.size_bytes
