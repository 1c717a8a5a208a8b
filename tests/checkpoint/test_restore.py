from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from checkpoint.errors import (
    CorruptCheckpointError,
    LayoutMismatchError,
    StorageUnavailableError,
)
from checkpoint.restore.restore import load_storage
from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage
from tests.checkpoint.conftest import both_stores
from tests.checkpoint.helpers import (
    DEADLINE_S,
    ThreadPeers,
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
    """What each of several ranks that want the same gets, or raises."""
    wanted = make_tensors(step)

    def load(peers: ThreadPeers) -> dict[str, object] | BaseException:
        tensors = make_tensors(99)
        try:
            extra = load_storage(storage, step, tensors, peers)
        except (CorruptCheckpointError, StorageUnavailableError, LayoutMismatchError) as error:
            return error
        assert same_bits(tensors, wanted)
        return extra

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(load, ThreadPeers.of(size)))


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


def test_all_replicas_get_the_same_bits(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [4])
    assert load_together(Storage(url), 4, 3) == [{"step": 4}] * 3


@both_stores
def test_checkpoint_in_many_blocks_is_read_bitwise(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks end in the middle of tensors; tensors span several blocks."""
    monkeypatch.setattr("checkpoint.upload.part.BLOCK_BYTES", 37)
    monkeypatch.setattr("checkpoint.core.blocks.BLOCK_BYTES", 37)
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
    monkeypatch.setattr("checkpoint.upload.part.BLOCK_BYTES", 64)
    monkeypatch.setattr("checkpoint.core.blocks.BLOCK_BYTES", 64)
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
    read_into = storage.read_into
    reads: list[int] = []

    def flaky(path: str, start: int, into: memoryview) -> int:
        reads.append(start)
        count = read_into(path, start, into)
        if len(reads) == 1:
            into[:] = bytes(len(into))
        return count

    storage.read_into = flaky  # type: ignore[method-assign]  # a cable, not a class
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


def test_another_model_is_refused_with_the_first_tensor_that_differs(
    url: str, tmp_path: Path
) -> None:
    commit_steps(url, tmp_path / "memory", [4])
    storage, tensors = Storage(url), make_tensors(4)
    with pytest.raises(LayoutMismatchError, match=r"holds model.weight as float32 \(4, 8\)"):
        load_alone(storage, 4, make_tensors(4, width=16))
    with pytest.raises(LayoutMismatchError, match=r"1 tensors that this model has not.*turned"):
        load_alone(storage, 4, tensors[:-1])
    more = NamedTensor("model.more", torch.zeros(2), (2,), (0,))
    with pytest.raises(LayoutMismatchError, match=r"has no tensor model.more"):
        load_alone(storage, 4, [*tensors, more])


def commit_shards(url: str, memory: Path, step: int, num_ranks: int) -> list[torch.Tensor]:
    """A checkpoint of several ranks; returns the whole of each tensor."""
    stagers = []
    for rank in range(num_ranks):
        tensors = make_tensors(step, rank=rank, ranks=num_ranks)
        stagers.append(make_stager(memory, tensors, rank=rank, world_size=num_ranks))
    everyone = range(num_ranks)
    with uploading(url, memory, local=everyone, savers=everyone) as (uploader, news):
        for rank, stager in enumerate(stagers):
            stager.save(step, {"rank": rank}, upload=True, common_step=-1)
        assert uploader.drain(DEADLINE_S)
        assert news.committed == [step]
    for stager in stagers:
        stager.close()
    shards = [make_tensors(step, rank=rank, ranks=num_ranks) for rank in everyone]
    first = torch.cat([tensors[0].tensor for tensors in shards])
    return [first, *(named.tensor for named in shards[0][1:])]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_checkpoint_of_two_ranks_loads_on_any_number(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    """The first tensor has eight rows: they are cut evenly, unevenly, and not at all."""
    monkeypatch.setattr("checkpoint.upload.part.BLOCK_BYTES", 37)
    monkeypatch.setattr("checkpoint.core.blocks.BLOCK_BYTES", 37)
    whole = commit_shards(url, tmp_path / "memory", 6, 2)
    storage = Storage(url)
    cuts = [round(8 * rank / num_ranks) for rank in range(num_ranks + 1)]

    def load(peers: ThreadPeers) -> dict[str, object]:
        first, last = cuts[peers.rank : peers.rank + 2]
        tensors = [
            NamedTensor("model.weight", torch.zeros(last - first, 8), (8, 8), (first, 0)),
            *make_tensors(99)[1:],
        ]
        extra = load_storage(storage, 6, tensors, peers)
        assert torch.equal(tensors[0].tensor, whole[0][first:last])
        for named, wanted in zip(tensors[1:], whole[1:], strict=True):
            assert torch.equal(named.tensor, wanted)
        return extra

    with ThreadPoolExecutor(num_ranks) as pool:
        extras = list(pool.map(load, ThreadPeers.of(num_ranks)))
    # The layout that saved finds its own; any other is given the first.
    assert extras == ([{"rank": 0}, {"rank": 1}] if num_ranks == 2 else [{"rank": 0}] * num_ranks)


def test_every_byte_leaves_the_store_once(url: str, tmp_path: Path) -> None:
    commit_steps(url, tmp_path / "memory", [4])
    storage = Storage(url)
    read_into = storage.read_into
    num_read: list[int] = []

    def counted(path: str, start: int, into: memoryview) -> int:
        num_read.append(len(into))
        return read_into(path, start, into)

    storage.read_into = counted  # type: ignore[method-assign]  # a meter on the real one
    assert load_together(storage, 4, 4) == [{"step": 4}] * 4
    _, manifest = storage.read_commit(4)
    assert sum(num_read) == sum(part.nbytes for part in manifest.parts)
