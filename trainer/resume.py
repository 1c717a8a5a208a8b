"""Where an attempt goes on from: all ranks agree on one step, then load it.

Host memory comes first: the newest step that every rank has sealed in the same
attempt, unless storage is known to be ahead. Then storage, newest commit first, of
whatever layout it is. A checkpoint that turns out corrupt on any rank is dropped by
all, loudly, for the next older.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpoint.peers import agree, attempt
from checkpoint.restore import (
    CorruptCheckpointError,
    Peers,
    SealedStep,
    load_memory,
    load_storage,
    sealed_steps,
)
from checkpoint.stage import NamedTensor
from checkpoint.storage import Storage
from outlast.errors import FatalError
from trainer.parallel.mesh import Mesh

# Numbers that ranks compare: step and attempt of each host-memory slot, of which there
# are three or four, or the newest commits.
_MAX_NUMBERS = 16
_NONE = -1

Load = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A step that was loaded, and what came with it besides tensors."""

    step: int
    source: str
    extra: dict[str, Any]


def restore(
    tensors: Sequence[NamedTensor],
    mesh: Mesh,
    *,
    join: Callable[[], Peers],
    memory_dir: Path,
    checkpoint_url: str,
    committed_step: int,
) -> Restored | None:
    """Load the newest common state into `tensors`; None when there is none at all.

    `join` makes the group of all ranks, which only a restore from storage needs.
    `committed_step` is the newest that the controller knows to be in storage.

    Raises:
        FatalError: checkpoints exist, but none of them can be loaded.
    """
    in_memory = _common(mesh, sealed_steps(memory_dir, tensors))
    loads = [
        (sealed.step, partial(load_memory, memory_dir, sealed, tensors))
        for sealed in in_memory
        if sealed.step >= committed_step
    ]
    restored = _first_loadable(mesh, loads, "host memory")
    if restored is not None:
        return restored

    storage = Storage(checkpoint_url)
    try:
        peers = join()
        committed = _committed(peers, storage)
        restored = _from_storage(tensors, mesh, storage, committed, peers)
    finally:
        storage.close()
    if restored is None and (committed or committed_step > 0):
        raise FatalError(
            f"no checkpoint below {checkpoint_url} can be loaded (committed: {committed}, "
            f"known to the controller: {committed_step}); bring one back or submit a new job"
        )
    return restored


def _committed(peers: Peers, storage: Storage) -> list[int]:
    """The committed steps as rank 0 sees them: a listing may differ between readers."""
    found = attempt(storage.committed_steps) if peers.rank == 0 else []
    agree(peers, 0, found if isinstance(found, Exception) else None)
    steps: list[int] = json.loads(peers.from_rank_0(json.dumps(found).encode()))
    return steps


def _from_storage(
    tensors: Sequence[NamedTensor],
    mesh: Mesh,
    storage: Storage,
    committed: Sequence[int],
    peers: Peers,
) -> Restored | None:
    def load(step: int) -> dict[str, Any]:
        return load_storage(storage, step, tensors, peers)

    def quarantine(step: int) -> None:
        # Out of the way, so that the step can be committed again; its bytes are kept.
        if mesh.rank == 0:
            storage.quarantine_step(step)

    loads = [(step, partial(load, step)) for step in committed]
    return _first_loadable(mesh, loads, "storage", drop=quarantine)


def _first_loadable(
    mesh: Mesh,
    loads: Sequence[tuple[int, Load]],
    source: str,
    *,
    drop: Callable[[int], None] | None = None,
) -> Restored | None:
    """Load the first step that is whole on every rank; `drop` those before it."""
    for index, (step, load) in enumerate(loads):
        problem = ""
        extra: dict[str, Any] = {}
        try:
            extra = load()
        except CorruptCheckpointError as error:
            problem = error.what
        if _all_ranks(mesh, problem == ""):
            return Restored(step=step, source=source, extra=extra)
        rest = loads[index + 1 :]
        following = f"step {rest[0][0]}" if rest else "an older source"
        reason = problem or "corrupt on another rank"
        print(
            f"checkpoint step {step}: {reason} ({source}); falling back to {following}",
            file=sys.stderr,
            flush=True,
        )
        if drop is not None:
            drop(step)
    return None


def _common(mesh: Mesh, sealed: Sequence[SealedStep]) -> list[SealedStep]:
    """What every rank has, newest first."""

    def pack(steps: Sequence[SealedStep]) -> Tensor:
        return _pack([number for step in steps for number in step], mesh.device)

    def unpack(row: Tensor) -> list[SealedStep]:
        numbers = _unpack(row)
        return [SealedStep(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]

    def intersect(rows: Tensor) -> Tensor:
        first, *others = [unpack(row) for row in rows]
        return pack([step for step in first if all(step in other for other in others)])

    return unpack(mesh.fold(pack(sealed), intersect))


def _all_ranks(mesh: Mesh, ok: bool) -> bool:
    row = torch.tensor([int(ok)], dtype=torch.int64, device=mesh.device)
    return bool(mesh.fold(row, lambda rows: rows.amin(dim=0)).item())


def _pack(numbers: Sequence[int], device: torch.device) -> Tensor:
    padded = [*numbers[:_MAX_NUMBERS], *[_NONE] * (_MAX_NUMBERS - len(numbers))]
    return torch.tensor(padded, dtype=torch.int64, device=device)


def _unpack(row: Tensor) -> list[int]:
    return [number for number in row.tolist() if number != _NONE]
