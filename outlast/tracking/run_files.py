"""What the files of W&B's runs hold: logs of records as LevelDB writes them, behind a head.

W&B writes them in a process of its own, some kilobytes at a time, and that process lives a moment
longer than the one that logs. So the file of a run that was killed may end within a record, and
may still grow: `settle` keeps its whole records, and what is written later is lost.
"""

from __future__ import annotations

import shutil
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HEAD_BYTES = 7
_BLOCK_BYTES = 1 << 15
# Of a piece of a record: checksum, length and kind.
_PIECE = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


class Held(NamedTuple):
    """What a file holds."""

    last_step: int
    """0: of none."""
    is_finished: bool
    """Whether nothing comes behind it: the run was ended."""
    num_bytes: int
    """Up to the end of the last whole record."""


def runs_of(folder: Path, job_id: str, *, offline_only: bool) -> list[Path]:
    """The files of a job's runs in a folder of W&B's."""
    kind = "offline-run" if offline_only else "*run"
    return sorted(folder.glob(f"wandb/{kind}-*/run-{job_id}.wandb"))


def settle(path: Path) -> int:
    """The last step that a file holds, now and from now on.

    A process that still writes to it goes on in a file without a name.
    """
    data = path.read_bytes()
    held = held_in(data)
    if not held.is_finished:
        fresh = path.with_suffix(".tmp")
        fresh.write_bytes(data[: held.num_bytes])
        shutil.copymode(path, fresh)
        fresh.replace(path)
    return held.last_step


def held_in(data: bytes) -> Held:
    """What the bytes of a file are, as far as they are whole."""
    from wandb.proto import wandb_internal_pb2

    kind: Any = wandb_internal_pb2.Record
    last, is_finished, num_bytes = 0, False, min(_HEAD_BYTES, len(data))
    for content, end in records(data):
        record = kind.FromString(content)
        if record.WhichOneof("record_type") == "history":
            last = max(last, record.history.step.num)
        is_finished, num_bytes = record.WhichOneof("record_type") == "exit", end
    return Held(last_step=last, is_finished=is_finished, num_bytes=num_bytes)


def records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Whole records, each with where it ends, up to the first that is not."""
    at, parts = _HEAD_BYTES, b""
    while True:
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _PIECE.size:
            # No piece begins so close to the end of a block.
            at += left
        if at + _PIECE.size > len(data):
            return
        checksum, length, kind = _PIECE.unpack_from(data, at)
        begin = at + _PIECE.size
        content = data[begin : begin + length]
        begins = kind in (_WHOLE, _FIRST)
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST) or len(content) < length:
            return
        if zlib.crc32(content, zlib.crc32(bytes([kind]))) != checksum:
            return
        at = begin + length
        parts = content if begins else parts + content
        if kind in (_WHOLE, _LAST):
            yield parts, at
