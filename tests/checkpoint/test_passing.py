"""Ranks that pass blocks on fill their tensors within their bounds, and never wait for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from checkpoint.core.manifest import CommitRecord, Manifest
from checkpoint.core.reading import plan_reading
from checkpoint.errors import CorruptCheckpointError, StorageUnavailableError
from checkpoint.restore import load_storage
from checkpoint.stage import NamedTensor
from checkpoint.storage import Storage
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

    def read_range(self, path: str, start: int, end: int) -> bytes:
        self.read.update((path, at) for at in range(start, end))
        return self.payloads[path][start:end]

    def flip(self, at: int) -> None:
        """Change a bit of the last file, for good."""
        path = list(self.payloads)[-1]
        raw = bytearray(self.payloads[path])
        raw[at] ^= 1
        self.payloads[path] = bytes(raw)


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is a unit, and hardly anything may be under way."""
    monkeypatch.setattr("checkpoint.restore.plan_reading", partial(plan_reading, unit_bytes=1))
    monkeypatch.setattr("checkpoint.passing._UNDER_WAY_BYTES", 1)
    monkeypatch.setattr("checkpoint.passing._ROUNDS_PER_VERDICT", 3)


def together(size: int, job: Callable[[ThreadPeers], object]) -> list[object]:
    """What a job gives or raises on every rank."""

    def run(peers: ThreadPeers) -> object:
        try:
            return job(peers)
        except (CorruptCheckpointError, StorageUnavailableError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, ThreadPeers.of(size), timeout=DEADLINE_S))


def load(storage: Storage, cut: Cut, peers: ThreadPeers) -> str:
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
    load_storage(storage, 3, tensors, peers)
    for named, expected in zip(tensors, wanted, strict=True):
        assert named.tensor.view(-1).view(torch.uint8).numpy().tobytes() == content(expected)
    return "filled"


@pytest.mark.parametrize(("saved", "loaded"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_all_ranks_get_their_bytes_and_the_store_gives_each_once(saved: str, loaded: str) -> None:
    storage = Payloads(*checkpoint_of(CUTS[saved], block_bytes=48))
    cut = CUTS[loaded]
    assert together(cut.size, partial(load, storage, cut)) == ["filled"] * cut.size
    assert set(storage.read.values()) == {1}
    assert len(storage.read) == sum(len(payload) for payload in storage.payloads.values())


@pytest.mark.parametrize("loaded", ["replicas", "tp2-dp2-zero", "interleaved-dp2"])
@pytest.mark.parametrize("at", [0, 700, -1])
def test_a_flipped_bit_is_the_same_error_on_every_rank(loaded: str, at: int) -> None:
    """At the first verdict, at a later one, and at the last."""
    storage = Payloads(*checkpoint_of(CUTS["tp2-pp2"], block_bytes=48))
    storage.flip(at)
    cut = CUTS[loaded]
    errors = together(cut.size, partial(load, storage, cut))
    assert {type(error) for error in errors} == {CorruptCheckpointError}
    assert len({str(error) for error in errors}) == 1
    assert "do not fit their checksum" in str(errors[0])


def test_a_store_that_fails_one_rank_fails_all_and_accuses_no_file() -> None:
    """Even when another rank finds a damaged block: the checkpoint may be whole."""
    storage = Payloads(*checkpoint_of(CUTS["dense"], block_bytes=48))
    storage.flip(0)
    whole = storage.read_range

    def read_range(path: str, start: int, end: int) -> bytes:
        if start >= 48:
            raise StorageUnavailableError("the store is away")
        return whole(path, start, end)

    storage.read_range = read_range  # type: ignore[method-assign]  # a cable, not a class
    errors = together(4, partial(load, storage, CUTS["replicas"]))
    assert {str(error) for error in errors} == {"the store is away"}
    assert {type(error) for error in errors} == {StorageUnavailableError}
