"""Ranks that pass blocks on fill their tensors within their bounds, and never wait for ever."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from checkpoint.core.manifest import CommitRecord, Manifest
from checkpoint.core.reading import plan_reading
from checkpoint.errors import CorruptCheckpointError, StorageUnavailableError
from checkpoint.restore.restore import Node, load_storage
from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage
from tests.checkpoint.helpers import DEADLINE_S, ThreadPeers
from tests.checkpoint.layouts import Cut, checkpoint_of, content

CUTS = {
    "dense": Cut(tp=1, pp=1, dp=1, sharded=False, split=(4,)),
    "replicas": Cut(tp=1, pp=1, dp=4, sharded=False, split=(4,)),
    "tp2-pp2": Cut(tp=2, pp=2, dp=1, sharded=False, split=(1, 3)),
    "tp2-dp2-zero": Cut(tp=2, pp=1, dp=2, sharded=True, split=(4,)),
    "interleaved-dp2": Cut(tp=1, pp=2, dp=2, sharded=False, split=(1, 1, 1, 1)),
}
PAIRS = [(one, other) for one in CUTS for other in CUTS]


class Payloads(Storage):
    """A store of one checkpoint, which counts what is read of it."""

    def __init__(self, manifest: Manifest, payloads: list[bytes]) -> None:
        self._manifest = manifest
        self.payloads = {
            f"step-00000003.1/{part.file}": payload
            for part, payload in zip(manifest.parts, payloads, strict=True)
        }
        self.read: Counter[tuple[str, int]] = Counter()

    def read_commit(self, step: int) -> tuple[CommitRecord, Manifest]:
        commit = CommitRecord(
            step=step, attempt=1, world_size=1, size_bytes=0, manifest_sha256="unused"
        )
        return commit, self._manifest

    def size(self, path: str) -> int:
        return len(self.payloads[path])

    def read_into(self, path: str, start: int, into: memoryview) -> int:
        self.read.update((path, at) for at in range(start, start + len(into)))
        raw = self.payloads[path][start : start + len(into)]
        into[: len(raw)] = raw
        return len(raw)

    def flip(self, at: int) -> None:
        """Change a bit of the last file, for good."""
        path = list(self.payloads)[-1]
        raw = bytearray(self.payloads[path])
        raw[at] ^= 1
        self.payloads[path] = bytes(raw)


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is a unit, and hardly anything may be under way."""
    monkeypatch.setattr(
        "checkpoint.restore.restore.plan_reading", partial(plan_reading, unit_bytes=1)
    )
    monkeypatch.setattr("checkpoint.restore.redistribute._UNDER_WAY_BYTES", 1)
    monkeypatch.setattr("checkpoint.restore.redistribute._ROUNDS_PER_VERDICT", 3)
    monkeypatch.setattr("checkpoint.restore.redistribute.MOST_LENT", 1)
    monkeypatch.setattr("checkpoint.restore.sharing.MOST_LENT", 1)
    monkeypatch.setattr("checkpoint.restore.sharing.NUM_READING", 1)


def together(size: int, job: Callable[[ThreadPeers], object]) -> list[object]:
    """What a job gives or raises on every rank."""

    def run(peers: ThreadPeers) -> object:
        try:
            return job(peers)
        except (CorruptCheckpointError, StorageUnavailableError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, ThreadPeers.of(size), timeout=DEADLINE_S))


# Which ranks share memory: none, all, or those of two nodes.
NODES: dict[str, int | None] = {"apart": None, "on one node": 99, "on nodes of two": 2}


def node_of(folder: Path, peers: ThreadPeers, ranks_per_node: int | None) -> Node | None:
    if ranks_per_node is None:
        return None
    number = peers.rank // ranks_per_node
    ranks = range(peers.size)[number * ranks_per_node :][:ranks_per_node]
    return Node(folder=folder / str(number), ranks=frozenset(ranks))


def load(
    storage: Storage,
    cut: Cut,
    peers: ThreadPeers,
    *,
    folder: Path | None = None,
    ranks_per_node: int | None = None,
) -> str:
    wanted = cut.held_by(peers.rank)
    tensors = [
        NamedTensor(
            named.name,
            torch.zeros(named.shape, dtype=getattr(torch, named.dtype)),
            named.global_shape,
            named.offsets,
        )
        for named in wanted
    ]
    node = None if folder is None else node_of(folder, peers, ranks_per_node)
    load_storage(storage, 3, tensors, peers, node=node)
    for named, expected in zip(tensors, wanted, strict=True):
        assert named.tensor.view(-1).view(torch.uint8).numpy().tobytes() == content(expected)
    return "filled"


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(("saved", "loaded"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_all_ranks_get_their_bytes_and_the_store_gives_each_once(
    saved: str, loaded: str, nodes: str, tmp_path: Path
) -> None:
    storage = Payloads(*checkpoint_of(CUTS[saved], block_bytes=48))
    cut = CUTS[loaded]
    job = partial(load, storage, cut, folder=tmp_path, ranks_per_node=NODES[nodes])
    assert together(cut.size, job) == ["filled"] * cut.size
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert set(storage.read.values()) == {1}
    assert len(storage.read) == sum(len(payload) for payload in storage.payloads.values())


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("loaded", ["replicas", "tp2-dp2-zero", "interleaved-dp2"])
@pytest.mark.parametrize("at", [0, 700, -1])
def test_a_flipped_bit_is_the_same_error_on_every_rank(
    loaded: str, at: int, nodes: str, tmp_path: Path
) -> None:
    """At the first verdict, at a later one, and at the last."""
    storage = Payloads(*checkpoint_of(CUTS["tp2-pp2"], block_bytes=48))
    storage.flip(at)
    cut = CUTS[loaded]
    job = partial(load, storage, cut, folder=tmp_path, ranks_per_node=NODES[nodes])
    errors = together(cut.size, job)
    assert {type(error) for error in errors} == {CorruptCheckpointError}
    assert len({str(error) for error in errors}) == 1
    assert "do not fit their checksum" in str(errors[0])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_rank_without_room_for_a_pool_sends_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tmpfs is full: that is no reason not to restore."""
    storage = Payloads(*checkpoint_of(CUTS["dense"], block_bytes=48))
    allocate = os.posix_fallocate

    def full(handle: int, start: int, nbytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{handle}").endswith("redistribute-00001"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(handle, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    job = partial(load, storage, CUTS["replicas"], folder=tmp_path, ranks_per_node=4)
    assert together(4, job) == ["filled"] * 4
    assert set(storage.read.values()) == {1}


def test_a_pool_that_a_killed_attempt_left_is_not_used(tmp_path: Path) -> None:
    storage = Payloads(*checkpoint_of(CUTS["dense"], block_bytes=48))
    leftover = tmp_path / "0" / "redistribute-00002"
    leftover.parent.mkdir()
    leftover.write_bytes(b"x" * 10)
    job = partial(load, storage, CUTS["replicas"], folder=tmp_path, ranks_per_node=4)
    assert together(4, job) == ["filled"] * 4
    assert not leftover.exists()


def test_a_store_that_fails_one_rank_fails_all_and_accuses_no_file() -> None:
    """Even when another rank finds a damaged block: the checkpoint may be whole."""
    storage = Payloads(*checkpoint_of(CUTS["dense"], block_bytes=48))
    storage.flip(0)
    whole = storage.read_into

    def read_into(path: str, start: int, into: memoryview) -> int:
        if start >= 48:
            raise StorageUnavailableError("the store is away")
        return whole(path, start, into)

    storage.read_into = read_into  # type: ignore[method-assign]  # a cable, not a class
    errors = together(4, partial(load, storage, CUTS["replicas"]))
    assert {str(error) for error in errors} == {"the store is away"}
    assert {type(error) for error in errors} == {StorageUnavailableError}
