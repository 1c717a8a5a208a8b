"""Writes weights as the parts of a checkpoint, and goes on where it was cut off.

A part is written when its record is, as with the parts of a job. One of an earlier try counts
where its record says that it has the same tensors of the same source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from checkpoint.core import names
from checkpoint.core.checked_json import RecordError
from checkpoint.core.manifest import Manifest, PartRecord
from checkpoint.core.shards import Rectangle, ShardTable, ShardTensor, lay_out
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.framed import OnBytes, PartDraft, write_part

# What is done again at most. A tensor that is larger is a part of its own.
PART_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsDraft:
    """What a checkpoint of weights is called; `extra` is the same for no two sources."""

    step: int
    attempt: int
    extra: str

    @property
    def folder(self) -> str:
        return names.attempt_folder(self.step, self.attempt)


def write_parts(
    target: Storage,
    rectangles: Sequence[Rectangle],
    raw: Callable[[str], bytes],
    draft: WeightsDraft,
    on_bytes: OnBytes,
    part_bytes: int,
) -> Manifest:
    """Write all that is not there; `raw` gives the bytes of a tensor.

    Raises:
        StorageUnavailableError: the target does not answer.
    """
    groups = _grouped(rectangles, part_bytes)
    tables = [lay_out(rank, len(groups), group) for rank, group in enumerate(groups)]
    of_part = PartDraft(
        step=draft.step, attempt=draft.attempt, num_parts=len(groups), extra=draft.extra
    )
    found = _earlier(target, draft.folder, tables, of_part)
    if not found:
        target.delete_folder(draft.folder)
    parts = []
    for table in tables:
        part = found.get(table.rank)
        if part is None:
            pieces = partial(_pieces, raw)
            part = write_part(target, draft.folder, table, pieces, of_part, on_bytes)
            target.write_bytes(_record_path(draft.folder, table.rank), part.to_json())
        else:
            on_bytes(sum(shard.nbytes for shard in table.tensors))
        parts.append(part)
    return Manifest(
        step=draft.step, attempt=draft.attempt, world_size=len(groups), parts=tuple(parts)
    )


def forget_records(target: Storage, draft: WeightsDraft) -> None:
    """Delete what only a next try would read, once the checkpoint is committed."""
    target.delete_folder(f"{draft.folder}/{names.PARTS}")


def _pieces(raw: Callable[[str], bytes], shard: ShardTensor) -> list[bytes]:
    return [raw(shard.name)]


def _record_path(folder: str, rank: int) -> str:
    return f"{folder}/{names.PARTS}/{names.part_name(rank)}"


def _grouped(rectangles: Sequence[Rectangle], part_bytes: int) -> list[list[Rectangle]]:
    groups: list[list[Rectangle]] = [[]]
    size = 0
    for each in rectangles:
        if groups[-1] and size + each.nbytes > part_bytes:
            groups.append([])
            size = 0
        groups[-1].append(each)
        size += each.nbytes
    return groups


def _earlier(
    target: Storage, folder: str, tables: Sequence[ShardTable], draft: PartDraft
) -> dict[int, PartRecord]:
    """What an earlier try has left, by its number."""
    sizes = {entry.name: entry.nbytes for entry in target.entries(folder)}
    found = {}
    for table in tables if sizes else ():
        try:
            part = PartRecord.from_json(target.read_bytes(_record_path(folder, table.rank)))
        except (RecordError, FileNotFoundError):
            continue
        is_alike = (part.num_parts, part.extra) == (draft.num_parts, draft.extra)
        if is_alike and part.tensors == table.tensors and sizes.get(part.file) == part.nbytes:
            found[table.rank] = part
    return found
