"""Writes weights as the parts of a checkpoint, and goes on where it was cut off.

A part is written when its record is, as with the parts of a job. One of an earlier try counts
where its record says that it has the same tensors of the same source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from checkpoint.core import names
from checkpoint.core.checked_json import RecordError
from checkpoint.core.manifest import Manifest, PartRecord
from checkpoint.core.shards import Rectangle, ShardTable, lay_out
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.framed import OnBytes, PartDraft, write_part

# What is done again at most. A tensor that is larger is a part of its own.
PART_BYTES = 2 << 30


# A checkpoint of weights alone is of step 0: whoever loads it has a fresh optimizer.
STEP = 0
# Nobody else writes into the folder of a step that does not exist.
_ATTEMPT = 1
_FOLDER = names.attempt_folder(STEP, _ATTEMPT)


def write_parts(
    target: Storage,
    rectangles: Sequence[Rectangle],
    raw: Callable[[str], Iterator[bytes]],
    *,
    extra: str,
    on_bytes: OnBytes,
    part_bytes: int,
) -> Manifest:
    """Write all that is not there; `raw` gives the bytes of a tensor, in pieces.

    `extra` changes with the source, and with what is made of it.

    Raises:
        StorageUnavailableError: the target does not answer.
    """
    groups = _grouped(rectangles, part_bytes)
    tables = [lay_out(rank, len(groups), group) for rank, group in enumerate(groups)]
    draft = PartDraft(step=STEP, attempt=_ATTEMPT, num_parts=len(groups), extra=extra)
    found = _earlier(target, tables, draft)
    if not found:
        target.delete_folder(_FOLDER)
    parts = []
    for table in tables:
        part = found.get(table.rank)
        if part is None:
            part = write_part(
                target, _FOLDER, table, lambda shard: raw(shard.name), draft, on_bytes
            )
            target.write_bytes(_record_path(table.rank), part.to_json())
        else:
            on_bytes(sum(shard.nbytes for shard in table.tensors))
        parts.append(part)
    return Manifest(step=STEP, attempt=_ATTEMPT, world_size=len(groups), parts=tuple(parts))


def forget_records(target: Storage) -> None:
    """Delete what only a next try would read, once the checkpoint is committed."""
    target.delete_folder(f"{_FOLDER}/{names.PARTS}")


def _record_path(rank: int) -> str:
    return f"{_FOLDER}/{names.PARTS}/{names.part_name(rank)}"


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
    target: Storage, tables: Sequence[ShardTable], draft: PartDraft
) -> dict[int, PartRecord]:
    """What an earlier try has left, by its number."""
    sizes = {entry.name: entry.nbytes for entry in target.entries(_FOLDER)}
    found = {}
    for table in tables if sizes else ():
        try:
            part = PartRecord.from_json(target.read_bytes(_record_path(table.rank)))
        except (RecordError, FileNotFoundError):
            continue
        is_alike = (part.num_parts, part.extra) == (draft.num_parts, draft.extra)
        if is_alike and part.tensors == table.tensors and sizes.get(part.file) == part.nbytes:
            found[table.rank] = part
    return found
