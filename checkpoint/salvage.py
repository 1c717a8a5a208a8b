"""Saves what is intact of a damaged checkpoint to another place, and says what is lost.

Tensors that are whole go into a folder that torch's tools read; if that is all of them, and every
record is what was written, it is a checkpoint that a job can go on with. Of tensors that are not
whole, the intact pieces go into a folder of their own, each under a name that says where in its
tensor it belongs. Nothing is written where the checkpoint lies, not even a reader's lease.

What does not belong here: records (`remains.py`), and what damage costs (`core/salvaging.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from checkpoint.checksums import block_checksums
from checkpoint.core.manifest import Manifest, PartRecord
from checkpoint.core.pacing import MAX_PARALLEL
from checkpoint.core.salvaging import Piece, SalvagePlan, plan_salvage
from checkpoint.core.shards import ShardTensor, lay_out
from checkpoint.errors import (
    CorruptCheckpointError,
    StorageTimeoutError,
    StorageUnavailableError,
)
from checkpoint.remains import Remains, SavedPart, find_remains
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.framed import (
    OnBytes,
    PartDraft,
    commit,
    framed,
    write_description,
    write_part,
)

REPORT = "salvage.json"
PIECES = "pieces"
_READ_BLOCKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Bytes of a rank's file that are not what was written, or not there."""

    rank: int
    file: str
    start: int
    end: int
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A piece of a tensor that is nowhere; `indices` is empty where records do not place it."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    indices: str
    num_elements: int
    rank: int | None
    file: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvaged:
    """What was saved of a checkpoint, and what was not: the report.

    `tensors` is the folder of whole tensors and `pieces` that of what is intact of others, ""
    for none. `unverified` are ranks whose bytes or tensors nothing vouches for any more.
    """

    source: str
    target: str
    step: int
    attempt: int
    is_complete: bool
    tensors: str
    pieces: str
    num_whole: int
    num_partial: int
    num_lost: int
    saved_bytes: int
    lost_bytes: int
    records: tuple[str, ...]
    damage: tuple[Damage, ...]
    lost: tuple[Lost, ...]
    unverified: tuple[int, ...]
    other_attempts: tuple[str, ...]


def salvage(source: Storage, target: Storage, step: int, on_bytes: OnBytes) -> Salvaged:
    """Save what is intact of the checkpoint of `step`; the report is written to the target, too.

    Raises:
        NothingLeftError: nothing says what lies where.
        ValueError: the target is not empty, or is where the checkpoint lies.
        StorageUnavailableError: one of both places does not answer.
    """
    _check_target(source, target)
    remains = find_remains(source, step)
    with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="checkpoint-verify") as pool:
        check = partial(_damage, source, remains.folder)
        damage = list(pool.map(check, remains.parts))
    plan = plan_salvage(
        [part.tensors for part in remains.parts],
        [[(each.start, each.end) for each in found] for found in damage],
    )
    is_complete = plan.is_complete and remains.is_certain
    written = _Writer(source, target, remains, on_bytes).write(plan, is_complete=is_complete)
    report = _report(source, target, remains, plan, [each for found in damage for each in found])
    report = replace(
        report,
        is_complete=is_complete,
        tensors=remains.folder if plan.whole else "",
        pieces=PIECES if plan.partial else "",
        saved_bytes=written,
    )
    text = json.dumps(asdict(report), indent=1)
    target.write_bytes(REPORT, f"{text}\n".encode())
    return report


def _check_target(source: Storage, target: Storage) -> None:
    here, there = _place(source.url), _place(target.url)
    if there == here or there.startswith(f"{here}/"):
        raise ValueError(f"{target.url} is in the checkpoint's own folder; give another")
    found = target.entries("")
    if found:
        raise ValueError(
            f"{target.url} is not empty: there is {found[0].name}; give a new or empty folder"
        )


def _place(url: str) -> str:
    """A URL in one spelling, as far as is known."""
    path = url.removeprefix("file://")
    return str(Path(path).resolve()) if "://" not in path else path.rstrip("/")


def _damage(storage: Storage, folder: str, part: SavedPart) -> list[Damage]:
    """What is wrong with the file of a part; one stretch for blocks side by side."""
    path = f"{folder}/{part.file}"
    try:
        size = storage.size(path)
    except FileNotFoundError:
        return [_damaged(part, 0, part.nbytes, "the file is missing")] if part.nbytes else []
    found: list[Damage] = []
    end = min(size, part.nbytes)
    for start in range(0, end, _READ_BLOCKS * part.block_bytes):
        stop = min(start + _READ_BLOCKS * part.block_bytes, end)
        if _problem(storage, path, part, start, stop):
            # Block by block, and read again: that tells a bad transfer from bad bytes.
            for first in range(start, stop, part.block_bytes):
                last = min(first + part.block_bytes, stop)
                if problem := _problem(storage, path, part, first, last):
                    found.append(_damaged(part, first, last, problem))
    if size < part.nbytes:
        # What is before the cut in the last block cannot be compared.
        cut = size // part.block_bytes * part.block_bytes if part.blocks else size
        found = [each for each in found if each.start < cut]
        found.append(_damaged(part, cut, part.nbytes, f"the file ends at byte {size}"))
    return _merged(found)


def _problem(storage: Storage, path: str, part: SavedPart, start: int, end: int) -> str:
    """Why bytes from the start of a block on are of no use; "" if they are."""
    try:
        raw = storage.read_range(path, start, end)
    except FileNotFoundError:
        return "the file vanished"
    except StorageTimeoutError:
        raise
    except StorageUnavailableError as error:
        # A sector that cannot be read any more; whoever is away altogether does not list either.
        return str(error)
    if len(raw) != end - start:
        return "the file ends before"
    return "" if _fits(part, raw, start) else "they do not fit their checksum"


def _fits(part: SavedPart, raw: bytes, start: int) -> bool:
    """Whether bytes from the start of a block on are those that were written, if that is known."""
    if not part.blocks:
        return True
    sums = block_checksums(part.checksum, memoryview(raw), part.block_bytes)
    first = start // part.block_bytes
    return all(found == part.blocks[index] for index, found in enumerate(sums, first))


def _damaged(part: SavedPart, start: int, end: int, problem: str) -> Damage:
    return Damage(rank=part.rank, file=part.file, start=start, end=end, problem=problem)


def _merged(found: Sequence[Damage]) -> list[Damage]:
    merged: list[Damage] = []
    for each in found:
        if merged and (merged[-1].end, merged[-1].problem) == (each.start, each.problem):
            merged[-1] = replace(merged[-1], end=each.end)
        else:
            merged.append(each)
    return merged


class _Writer:
    """Writes pieces of one checkpoint to another place."""

    def __init__(
        self, source: Storage, target: Storage, remains: Remains, on_bytes: OnBytes
    ) -> None:
        self._source = source
        self._target = target
        self._remains = remains
        self._on_bytes = on_bytes

    def write(self, plan: SalvagePlan, *, is_complete: bool) -> int:
        """Write what the plan keeps; returns how many bytes of tensors that is."""
        manifest = self._folder(self._remains.folder, plan.whole, _of_tensor, keep_all=is_complete)
        if manifest is not None and is_complete:
            commit(self._target, manifest)
        elif manifest is not None:
            write_description(self._target, self._remains.folder, manifest)
        pieces = self._folder(PIECES, plan.partial, _of_its_own, keep_all=False)
        if pieces is not None:
            write_description(self._target, PIECES, pieces)
        return sum(piece.end - piece.start for piece in (*plan.whole, *plan.partial))

    def _folder(
        self,
        folder: str,
        pieces: Sequence[Piece],
        place: Callable[[Piece], tuple[str, tuple[int, ...], tuple[int, ...]]],
        *,
        keep_all: bool,
    ) -> Manifest | None:
        """Write pieces, in the files of the ranks that they come from; None when there are none.

        `keep_all` also makes the file of a rank of which nothing is needed.
        """
        all_parts = range(len(self._remains.parts)) if keep_all else ()
        by_part: dict[int, list[Piece]] = {index: [] for index in all_parts}
        for piece in pieces:
            by_part.setdefault(piece.part, []).append(piece)
        if not by_part:
            return None
        records = tuple(
            self._part(folder, self._remains.parts[index], held, place, len(by_part))
            for index, held in sorted(by_part.items())
        )
        return Manifest(
            step=self._remains.step,
            attempt=self._remains.attempt,
            world_size=self._remains.world_size,
            parts=records,
        )

    def _part(
        self,
        folder: str,
        part: SavedPart,
        pieces: Sequence[Piece],
        place: Callable[[Piece], tuple[str, tuple[int, ...], tuple[int, ...]]],
        num_parts: int,
    ) -> PartRecord:
        rectangles, sources = [], {}
        for piece in sorted(pieces, key=lambda each: each.start):
            name, global_shape, offsets = place(piece)
            sources[name, offsets] = piece
            rectangles.append(
                framed(
                    name,
                    piece.tensor.dtype,
                    global_shape=global_shape,
                    offsets=offsets,
                    shape=piece.shape,
                    nbytes=piece.end - piece.start,
                )
            )

        def raw(shard: ShardTensor) -> Iterator[bytes]:
            return self._raw(part, sources[shard.name, shard.offsets])

        draft = PartDraft(
            step=self._remains.step,
            attempt=self._remains.attempt,
            num_parts=num_parts,
            extra=part.extra,
        )
        table = lay_out(part.rank, self._remains.world_size, rectangles)
        return write_part(self._target, folder, table, raw, draft, self._on_bytes)

    def _raw(self, part: SavedPart, piece: Piece) -> Iterator[bytes]:
        """The bytes of a piece, compared once more: they may not be those that were looked at."""
        path = f"{self._remains.folder}/{part.file}"
        stride = _READ_BLOCKS * part.block_bytes
        begin = piece.start // part.block_bytes * part.block_bytes
        for start in range(begin, piece.end, stride) if piece.end > piece.start else ():
            last = min(start + stride, piece.end)
            # All of its last block, or there is nothing to compare it with.
            end = min(-(-last // part.block_bytes) * part.block_bytes, part.nbytes)
            try:
                found = self._source.read_range(path, start, end if part.blocks else last)
            except FileNotFoundError as error:
                raise CorruptCheckpointError(self._remains.step, f"{path} vanished") from error
            if not _fits(part, found, start):
                raise CorruptCheckpointError(
                    self._remains.step, f"{path}: bytes {start} to {end} change while they are read"
                )
            yield found[max(piece.start - start, 0) : last - start]


def _of_tensor(piece: Piece) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Name, shape and place of a piece as a part of its tensor."""
    return piece.tensor.name, piece.tensor.global_shape, piece.offsets


def _of_its_own(piece: Piece) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Name, shape and place of a piece as a tensor of its own."""
    return f"{piece.tensor.name}{piece.indices}", piece.shape, (0,) * len(piece.shape)


def _report(
    source: Storage, target: Storage, remains: Remains, plan: SalvagePlan, damage: list[Damage]
) -> Salvaged:
    lost = [_lost(remains, piece) for piece in plan.lost]
    lost += [
        Lost(
            tensor=each.tensor,
            dtype=each.dtype,
            shape=each.global_shape,
            indices="",
            num_elements=each.num_elements,
            rank=None,
            file="",
            start=0,
            end=0,
        )
        for each in plan.missing
    ]
    partial_names = {piece.tensor.name for piece in plan.partial}
    return Salvaged(
        source=source.url,
        target=target.url,
        step=remains.step,
        attempt=remains.attempt,
        is_complete=False,
        tensors="",
        pieces="",
        num_whole=len({piece.tensor.name for piece in plan.whole}),
        num_partial=len(partial_names),
        num_lost=len({each.tensor for each in lost} - partial_names),
        saved_bytes=0,
        lost_bytes=sum(piece.end - piece.start for piece in plan.lost),
        records=remains.problems,
        damage=tuple(damage),
        lost=tuple(lost),
        unverified=tuple(part.rank for part in remains.parts if not part.is_verifiable),
        other_attempts=remains.others,
    )


def _lost(remains: Remains, piece: Piece) -> Lost:
    part = remains.parts[piece.part]
    return Lost(
        tensor=piece.tensor.name,
        dtype=piece.tensor.dtype,
        shape=piece.tensor.global_shape,
        indices=piece.indices,
        num_elements=math.prod(piece.shape),
        rank=part.rank,
        file=part.file,
        start=piece.start,
        end=piece.end,
    )
