"""Restores from storage: every byte read once and passed on, beside every rank reading it all.

A local disk stands for a shared file system; SeaweedFS, which `tests/stores` also uses, is
a real object store. Replicas of one state load it, as after a restart on other machines.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # a re-export

from bench.baselines.dcp import load_all, save_all
from bench.checkpoint.gpt import S3_SIZE, SIZES, Size, mesh_of, noisy_state
from bench.checkpoint.options import Measured, Options, ratio
from bench.checkpoint.savers import Ours, state_dict
from bench.checkpoint.seaweed import s3_server
from bench.member import Rank
from bench.recovery.setting import wait_for
from bench.results import Claim
from bench.trainer.launch import run_ranks
from bench.trainer.quiet import NoBox
from checkpoint.restore.loaders import InPlace
from checkpoint.restore.peers import Alone
from checkpoint.restore.restore import Node, StorageUnavailableError, load_storage
from checkpoint.restore.resume import Sources, restore
from checkpoint.restore.storage_prefetch import StoragePrefetch
from checkpoint.stage.copy_stream import HostCopyStream
from checkpoint.stage.payload import NamedTensor
from checkpoint.storage.storage import Storage
from trainer.parallel.hosts import join_hosts
from trainer.parallel.mesh import Mesh

_PROGRAM = "bench.checkpoint.rank"
_WORLDS = (4, 8)
_S3_WORLD = 4
_STEP = 1


def measure(options: Options) -> Measured:
    """Claims against DCP and against every rank reading, on local disk and on S3."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
        rows += measure_at(f"file://{folder}", options, options.sized(SIZES["1"]), _WORLDS)
    with s3_server() as root:
        rows += measure_at(root, options, options.sized(S3_SIZE), (_S3_WORLD,))
    return rows, [claim for row in rows for claim in _claims(row)]


def measure_at(
    root: str, options: Options, size: Size, worlds: tuple[int, ...]
) -> list[dict[str, Any]]:
    """One row for each number of replicas that load what was saved below `root`."""
    place = {"size": asdict(size), "url": f"{root}/ours/job-1", "dcp_url": f"{root}/dcp"}
    stored = run_ranks("store", place, world_size=1, program=_PROGRAM)
    rows = []
    for world_size in worlds:
        arguments = {**place, "rounds": options.rounds, "digest": stored["digest"]}
        row = run_ranks("restore", arguments, world_size=world_size, program=_PROGRAM)
        rows.append({"store": root.partition(":")[0], "world_size": world_size, **stored, **row})
        print(f"restoring {size.name} on {world_size} ranks:", rows[-1], flush=True)
    return rows


def store(rank: Rank, *, size: Mapping[str, Any], url: str, dcp_url: str) -> dict[str, Any]:
    """Save one state both ways."""
    wait_for(partial(_takes_files, url), f"a first file at {url}")
    spec = Size(**size).spec()
    state = noisy_state(spec, mesh_of(rank, spec), rank.folder / "data")
    tensors = state.named_tensors()
    ours = Ours(tensors, state.extra(_STEP), HostCopyStream())
    try:
        ours.upload_to(url)
        ours.save()
        ours.settle()
    finally:
        ours.close()
    save_all(state_dict(tensors), dcp_url)
    return {
        "nbytes": sum(named.tensor.nbytes for named in tensors),
        "digest": _digest(tensors),
    }


def _takes_files(url: str) -> bool:
    """A server that has just started answers before it can store anything."""
    try:
        Storage(url).probe()
    except StorageUnavailableError:
        return False
    return True


def restore_all(
    rank: Rank, *, size: Mapping[str, Any], url: str, dcp_url: str, rounds: int, digest: str
) -> dict[str, Any]:
    """Seconds of each way to load it on every rank, one of each in turn."""
    spec = Size(**size).spec(dp=rank.world_size)
    mesh = mesh_of(rank, spec)
    tensors = noisy_state(spec, mesh, rank.folder / "data").named_tensors()
    # As the ranks of one agent have it.
    memory = Path(f"/dev/shm/{rank.folder.name}")
    node = Node(folder=memory, ranks=frozenset(range(rank.world_size)))
    ways: dict[str, Callable[[], None]] = {
        "ours": _Resume(rank, mesh, url, tensors, node),
        "ours_over_network": _Resume(rank, mesh, url, tensors, None),
        "every_rank_reads": partial(_read_alone, url, tensors),
        "dcp_load": partial(load_all, state_dict(tensors), dcp_url),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    used: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, load in ways.items():
            _forget(rank, tensors, (url, dcp_url))
            cpu_before_s = time.process_time()
            took_s = rank.timed(load)
            cpu_s = rank.sum(time.process_time() - cpu_before_s)
            if number == 0:
                assert _digest(tensors) == digest, f"{name} gave other bytes than were saved"
            else:
                found[name].append(took_s)
                used[name].append(cpu_s)
    if rank.rank == 0:
        memory.rmdir()
    return {"seconds": found, "cpu_s": used}


class _Resume:
    """What a worker of a new attempt does that finds nothing in host memory."""

    def __init__(
        self, rank: Rank, mesh: Mesh, url: str, tensors: list[NamedTensor], node: Node | None
    ) -> None:
        self._rank = rank
        self._node = node
        self._mesh = mesh
        self._url = url
        self._tensors = tensors
        self._attempt = 0

    def __call__(self) -> None:
        rank = self._rank
        self._attempt += 1
        join = partial(
            join_hosts,
            rank.rank,
            rank.world_size,
            store=PrefixStore(f"restore-{self._node is None}-{self._attempt}/", rank.store),
            recorder=NoBox(),
            gloo_interface=rank.interface,
        )
        sources = Sources(
            memory_dir=rank.folder / "nothing",
            own=StoragePrefetch(self._url, lists=rank.rank == 0),
            committed_step=0,
            other=None,
            join=join,
            node=self._node,
        )
        assert restore(InPlace(self._tensors), self._mesh, sources) is not None


def _read_alone(url: str, tensors: list[NamedTensor]) -> None:
    """The same reader without anybody to share the reading with."""
    load_storage(Storage(url), _STEP, tensors, Alone())


def _forget(rank: Rank, tensors: list[NamedTensor], urls: tuple[str, ...]) -> None:
    """As on a machine that has not seen the checkpoint: it is not in the cache of its files."""
    for named in tensors:
        named.tensor.zero_()
    for path in map(Path, (url.removeprefix("file://") for url in urls if ":///" in url)):
        for file in path.rglob("*") if rank.rank == 0 else ():
            if file.is_file():
                _drop_cache(file)


def _drop_cache(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        # What has not reached the disk stays.
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _digest(tensors: list[NamedTensor]) -> str:
    """Of all bytes, by name."""
    found = xxhash.xxh3_64()
    for named in sorted(tensors, key=lambda named: named.name):
        found.update(named.name.encode())
        found.update(named.tensor.numpy().data)
    return found.hexdigest()


def _claims(row: dict[str, Any]) -> list[Claim]:
    seconds, world_size = row["seconds"], row["world_size"]
    on_s3 = row["store"] == "s3"
    where = "SeaweedFS over S3, on this machine" if on_s3 else "local disk, nothing cached"
    how = (
        f"GPT state of {row['nbytes'] / 1e9:.2f} GB on {world_size} replicas here; {where}; "
        "the slowest rank; medians of paired rounds"
    )
    prefix = "s3_restore" if on_s3 else "restore"
    suffix = "" if on_s3 else f"_{world_size}_ranks"
    return [
        Claim(
            claim=f"{prefix}_vs_dcp_load{suffix}",
            value=ratio(seconds["dcp_load"], seconds["ours"]),
            unit="x",
            goal=">= 5" if on_s3 else "reported",
            baseline="torch's dcp.load of what dcp.save wrote there",
            how=how,
        ),
        Claim(
            claim=f"{prefix}_vs_every_rank_reads{suffix}",
            value=ratio(seconds["every_rank_reads"], seconds["ours"]),
            unit="x",
            goal="reported",
            baseline="every rank reads and verifies the whole of it by itself, with our reader",
            how=how,
        ),
    ]
