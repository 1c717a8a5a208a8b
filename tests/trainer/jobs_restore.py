"""What ranks do in tests of loading checkpoints."""

from __future__ import annotations

import errno
import hashlib
import itertools
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpoint.restore import storage_prefetch
from checkpoint.restore.loaders import InPlace
from checkpoint.restore.readahead import ReadAhead
from checkpoint.restore.resume import Sources, restore
from checkpoint.restore.sharing import Buffer
from checkpoint.storage.local import LocalFolder
from checkpoint.storage.storage import Storage
from outlast.errors import OutlastError
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from tests.trainer.jobs import Silent
from tests.trainer.ranks import RankContext
from trainer.parallel.hosts import join_hosts
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.worker.state import build_state


def resumed_state(context: RankContext, folder: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Everything that a rank gets back, by name and place, and the bytes that it read of each file.

    From host memory where there is any, else from storage.
    """
    parsed = parse_spec(spec)
    store = context.store()
    mesh = _mesh_of(context, store, parsed)
    state = build_state(parsed, mesh, folder / "data")
    tensors = state.named_tensors()
    read_bytes = _counting_reads()
    restored = restore(InPlace(tensors), mesh, _sources(context, folder, store, timeout_s=20.0))
    assert restored is not None
    return {
        "step": restored.step,
        "source": restored.source,
        "read_bytes": read_bytes,
        "tensors": [
            (named.name, named.global_shape, named.offsets, named.tensor.numpy().copy())
            for named in tensors
        ],
    }


def restore_with_trouble(
    context: RankContext,
    folder: Path,
    spec: dict[str, Any],
    trouble: str,
    culprit: int,
    patience_s: float = 0.0,
) -> str:
    """What a restore from storage comes to, or raises, when one rank's reads go wrong.

    `trouble`: it "leaves", it "hangs", or its store is "silent", "away" for two reads, "gone"
    or "forbidden".
    """
    parsed = parse_spec(spec)
    store = context.store()
    mesh = _mesh_of(context, store, parsed)
    state = build_state(parsed, mesh, folder / "data")
    # This process is a child of its own: what is replaced here ends with it.
    deadline_s = 1.0 if trouble == "silent" else 10.0
    storage_prefetch.Storage = partial(Storage, deadline_s=deadline_s)
    if context.rank == culprit:
        _break_reads(trouble)
    try:
        timeout_s = 5.0 if trouble == "hangs" else 30.0
        sources = _sources(context, folder, store, timeout_s=timeout_s, patience_s=patience_s)
        restored = restore(InPlace(state.named_tensors()), mesh, sources)
    except (OutlastError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    assert restored is not None
    content = b"".join(named.tensor.numpy().tobytes() for named in state.named_tensors())
    return f"step {restored.step}: {hashlib.sha256(content).hexdigest()}"


def messages_of_hosts(context: RankContext) -> dict[str, Any]:
    """Every operation of the group of all ranks."""
    peers = _join(context, context.store(), 20.0)
    own = bytes([context.rank]) * context.rank
    after = (context.rank + 1) % context.world_size
    before = (context.rank - 1) % context.world_size
    incoming = [torch.empty(4, dtype=torch.uint8) for _ in range(2)]
    receives = [peers.receive(incoming[tag], before, tag) for tag in (0, 1)]
    sends = [
        peers.send(torch.full((4,), 10 * context.rank + tag, dtype=torch.uint8), after, tag)
        for tag in (1, 0)
    ]
    for pending in (*receives, *sends):
        pending.wait()
    return {
        "largest": peers.largest(context.rank),
        "gathered": peers.gather(own),
        "from_rank_0": peers.from_rank_0(b"hello" if context.rank == 0 else b"ignored"),
        "nothing": peers.from_rank_0(b""),
        "received": [int(content[0]) for content in incoming],
    }


def abandon_amid_messages(context: RankContext) -> str:
    """Rank 0 gives up, and lets go of what it was to receive, while the others still send it."""
    store = context.store()
    peers = _join(context, store, 20.0)
    peers.largest(context.rank)
    content = torch.zeros(4 << 20, dtype=torch.uint8)
    if context.rank > 0:
        peers.receive(torch.empty(1, dtype=torch.uint8), 0, 1).wait()
        peers.send(content, 0, 0)
        store.set(f"sent by {context.rank}", b"")
        store.wait(["left"])
        peers.abandon()
        store.set(f"heard by {context.rank}", b"")
        return "told"
    others = range(1, context.world_size)
    for peer in others:
        # Kept by nobody here.
        peers.receive(content.clone(), peer, 0)
        peers.send(content[:1], peer, 1).wait()
    store.wait([f"sent by {peer}" for peer in others])
    peers.abandon()
    del peers
    store.set("left", b"")
    store.wait([f"heard by {peer}" for peer in others])
    return "left"


def _mesh_of(context: RankContext, store: Any, spec: JobSpec) -> Mesh:
    return build_mesh(
        spec.layout,
        context.rank,
        store=store,
        device=torch.device("cpu"),
        timeout_s=60,
        recorder=Silent(),
        tied_embeddings=spec.model.tied_embeddings,
        folds=spec.parallel.folds,
        gloo_interface="lo",
    )


def _sources(
    context: RankContext, folder: Path, store: Any, *, timeout_s: float, patience_s: float = 0.0
) -> Sources:
    return Sources(
        memory_dir=folder / "memory" / "job-1" / f"rank-{context.rank:05d}",
        own=storage_prefetch.StoragePrefetch(
            str(folder / "store" / "job-1"), lists=context.rank == 0
        ),
        committed_step=0,
        other=None,
        join=partial(_join, context, store, timeout_s),
        patience_s=patience_s,
    )


def _join(context: RankContext, store: Any, timeout_s: float) -> Any:
    return join_hosts(
        context.rank,
        context.world_size,
        store=store,
        recorder=Silent(),
        gloo_interface="lo",
        timeout_s=timeout_s,
    )


def _counting_reads() -> dict[str, int]:
    """Bytes of each file that this process reads from now on."""
    found: dict[str, int] = {}
    read_into = Storage.read_into

    def counted(self: Storage, path: str, start: int, into: memoryview) -> int:
        found[path] = found.get(path, 0) + len(into)
        return read_into(self, path, start, into)

    # This process is a child of its own: what is replaced here ends with it.
    Storage.read_into = counted  # type: ignore[method-assign]
    return found


def _break_reads(trouble: str) -> None:
    """Let the first read of this process go wrong, or more of them."""
    nothing = threading.Event()
    read_into = LocalFolder.read_into
    calls = itertools.count(1)

    def take(self: ReadAhead) -> Buffer:
        # Peers give up after 5 s.
        nothing.wait(0.0 if trouble == "leaves" else 12.0)
        raise KeyboardInterrupt

    def read(self: LocalFolder, path: str, start: int, into: memoryview) -> int:
        nothing.wait()
        return 0

    def refused(self: LocalFolder, path: str, start: int, into: memoryview) -> int:
        if trouble == "forbidden":
            raise PermissionError(errno.EACCES, "not yours")
        if trouble == "gone" or next(calls) <= 2:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody is there")
        return read_into(self, path, start, into)

    if trouble == "silent":
        LocalFolder.read_into = read  # type: ignore[method-assign]
    elif trouble in ("away", "gone", "forbidden"):
        LocalFolder.read_into = refused  # type: ignore[method-assign]
    elif trouble:
        ReadAhead.take = take  # type: ignore[method-assign]
