"""Finds the records of a checkpoint that may be damaged, and how far they can be trusted.

A manifest that fits its digest says everything. One that does not is made anew from torch's
description of the same files, the files themselves and what is readable of it: if that has the
digest, it is what was written. Else what can be read is all there is, and nothing vouches for it
but the checksums of the blocks.

What does not belong here: payloads (`salvage.py`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass

import torch

from checkpoint.checksums import CHECKSUM, block_checksums
from checkpoint.core import names
from checkpoint.core.checked_json import RecordError, sha256
from checkpoint.core.manifest import (
    BLOCK_BYTES,
    CommitRecord,
    Manifest,
    PartRecord,
    readable_parts,
)
from checkpoint.core.shards import ShardTensor
from checkpoint.storage.root_owner import owner_problem
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.foreign import ForeignCheckpointError, ForeignChunk, parse_metadata
from checkpoint.torch_format.frames import frame_of
from checkpoint.upload.cleaning import attempt_folders, quarantined
from outlast.errors import FatalError

_EXTRA = re.compile(r'"extra":("(?:[^"\\]|\\.)*")')
_WORLD = re.compile(r'"world_size":(\d+)')
_BLOCK = re.compile(r'"block_bytes":(\d+)')
_READ_BLOCKS = 8


class NothingLeftError(FatalError):
    """There is no record of the checkpoint that says what lies where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """The file of a rank as the records have it; no `blocks`: nothing to compare it with.

    `is_certain` says that what lies where is what was written.
    """

    rank: int
    file: str
    nbytes: int
    block_bytes: int
    checksum: str
    blocks: tuple[int, ...]
    tensors: tuple[ShardTensor, ...]
    extra: str
    is_certain: bool

    @property
    def is_verifiable(self) -> bool:
        """Whether bytes that fit its checksums are the tensors that they are said to be."""
        return self.is_certain and bool(self.blocks or not self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """The records of one checkpoint. `problems` are those of records, in words.

    `others` are folders of the same step by other attempts; nothing is taken from them, since
    their bits need not be the same.
    """

    step: int
    attempt: int
    world_size: int
    parts: tuple[SavedPart, ...]
    problems: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def folder(self) -> str:
        return names.attempt_folder(self.step, self.attempt)

    @property
    def is_certain(self) -> bool:
        """Whether all records are what was written, or could be made so."""
        return all((part.is_certain and part.blocks) or not part.nbytes for part in self.parts)


def newest_remains(storage: Storage) -> int:
    """The newest step that was committed; else of which anything is there.

    Raises:
        NothingLeftError: there is nothing.
    """
    steps = storage.committed_steps() or [step for step, _ in quarantined(storage)]
    steps = steps or [folder.step for folder in attempt_folders(storage)]
    if not steps:
        raise NothingLeftError(f"{storage.url} has no checkpoint, and no remains of one")
    return max(steps)


def find_remains(storage: Storage, step: int) -> Remains:
    """The records of the checkpoint of `step`, whole or not.

    Raises:
        NothingLeftError: nothing says what lies where.
        StorageUnavailableError: storage does not answer.
    """
    owner = owner_problem(storage)
    problems = [owner] if owner else []
    folders = {each.attempt for each in attempt_folders(storage) if each.step == step}
    commit = _commit_of(storage, step, folders, problems)
    attempt = commit.attempt if commit is not None else _likeliest(storage, step, folders)
    if attempt is None:
        raise NothingLeftError(
            f"{storage.url} has nothing of step {step}; `outlast ckpt ls` lists what there is"
        )
    folder = names.attempt_folder(step, attempt)
    digest = "" if commit is None else commit.manifest_sha256
    raw = _read(storage, f"{folder}/{names.MANIFEST}")
    description = _read(storage, f"{folder}/{names.METADATA}")
    manifest = _whole(folder, raw, digest, problems)
    if manifest is None:
        manifest = _rebuilt(storage, (step, attempt), raw or b"", description, digest)
        if manifest is not None:
            problems[-1] += "; made anew from the other files, and its digest is right"
    if manifest is not None:
        if manifest.metadata_sha256 and sha256(description or b"") != manifest.metadata_sha256:
            state = "is missing" if description is None else "is not what the manifest names"
            problems.append(f"{folder}/{names.METADATA} {state}")
        parts = tuple(_of_record(part, is_certain=True) for part in manifest.parts)
        world_size = manifest.world_size
    else:
        parts = _readable(storage, folder, raw or b"", description, problems)
        world_size = max(part.rank for part in parts) + 1
    others = (names.attempt_folder(step, each) for each in sorted(folders - {attempt}))
    return Remains(
        step=step,
        attempt=attempt,
        world_size=world_size,
        parts=parts,
        problems=tuple(problems),
        others=tuple(others),
    )


def _commit_of(
    storage: Storage, step: int, folders: set[int], problems: list[str]
) -> CommitRecord | None:
    """The commit record, where it was or where it was set aside; None when it is of no use."""
    aside = [names.quarantine_path(*each) for each in quarantined(storage) if each[0] == step]
    paths = [names.commit_path(step), *sorted(aside, reverse=True)]
    is_damaged = False
    for path in paths:
        raw = _read(storage, path)
        if raw is None:
            continue
        is_damaged = True
        try:
            record = CommitRecord.from_json(raw)
        except RecordError as error:
            problems.append(f"{path}: {error}")
            continue
        if record.step == step:
            return record
        problems.append(f"{path}: is of step {record.step}")
    if folders and not is_damaged:
        problems.append(f"{names.commit_path(step)} is missing")
    return None


def _likeliest(storage: Storage, step: int, folders: set[int]) -> int | None:
    """The attempt that was committed, as far as is known: a manifest comes just before that."""
    newest_first = sorted(folders, reverse=True)
    for attempt in newest_first:
        folder = names.attempt_folder(step, attempt)
        if any(entry.name == names.MANIFEST for entry in storage.entries(folder)):
            return attempt
    return next(iter(newest_first), None)


def _whole(folder: str, raw: bytes | None, digest: str, problems: list[str]) -> Manifest | None:
    """The manifest if it fits its own digest. Another than was committed is whole all the same."""
    path = f"{folder}/{names.MANIFEST}"
    if raw is None:
        problems.append(f"{path} is missing")
        return None
    try:
        manifest = Manifest.from_json(raw)
    except RecordError as error:
        problems.append(f"{path}: {error}")
        return None
    if digest and sha256(raw) != digest:
        problems.append(f"{path}: is not the manifest that the commit record names")
    return manifest


def _rebuilt(
    storage: Storage, at: tuple[int, int], raw: bytes, description: bytes | None, digest: str
) -> Manifest | None:
    """The manifest that was written, made anew; None unless its digest proves it."""
    folder = names.attempt_folder(*at)
    text = raw.decode(errors="replace")
    by_file = _described(description)
    extras = [json.loads(match) for match in _EXTRA.findall(text)]
    world_size, block_bytes = _most_common(_WORLD, text), _most_common(_BLOCK, text)
    if not (world_size and block_bytes) or len(extras) != len(by_file) or description is None:
        return None
    step, attempt = at
    try:
        parts = tuple(
            PartRecord(
                step=step,
                attempt=attempt,
                rank=rank,
                world_size=world_size,
                num_parts=len(by_file),
                file=file,
                nbytes=nbytes,
                block_bytes=block_bytes,
                checksum=CHECKSUM,
                blocks=_sums(storage, f"{folder}/{file}", nbytes, block_bytes),
                tensors=tensors,
                extra=extra,
            )
            for (file, (rank, tensors)), extra in zip(by_file.items(), extras, strict=True)
            for nbytes in (storage.size(f"{folder}/{file}"),)
        )
        manifest = Manifest(
            step=step,
            attempt=attempt,
            world_size=world_size,
            parts=parts,
            metadata_sha256=sha256(description),
        )
    except (ValueError, FileNotFoundError):
        return None
    made = manifest.to_json()
    is_proven = sha256(made) == digest or json.loads(made)["sha256"].encode() in raw
    return manifest if is_proven else None


def _readable(
    storage: Storage,
    folder: str,
    raw: bytes,
    description: bytes | None,
    problems: list[str],
) -> tuple[SavedPart, ...]:
    """What can be read of damaged records: of torch's description first."""
    records = {record.file: record for record in readable_parts(raw)}
    by_file = _described(description)
    is_named = description is not None and sha256(description).encode() in raw
    if not by_file:
        problems.append(f"{folder}/{names.METADATA} cannot be read either")
        if not records:
            raise NothingLeftError(
                f"{storage.url}: {'; '.join(problems)}: nothing says what lies where in {folder}"
            )
        return tuple(_of_record(record, is_certain=False) for record in records.values())
    parts = []
    for file, (rank, tensors) in by_file.items():
        record = records.get(file)
        nbytes = max((tensor.frame_end for tensor in tensors), default=0)
        has_sums = record is not None and record.nbytes == nbytes
        parts.append(
            SavedPart(
                rank=rank,
                file=file,
                nbytes=nbytes,
                block_bytes=record.block_bytes if record is not None and has_sums else BLOCK_BYTES,
                checksum=record.checksum if record is not None and has_sums else CHECKSUM,
                blocks=record.blocks if record is not None and has_sums else (),
                tensors=tensors,
                extra="" if record is None else record.extra,
                is_certain=is_named or (record is not None and record.tensors == tensors),
            )
        )
    return tuple(parts)


def _described(description: bytes | None) -> dict[str, tuple[int, tuple[ShardTensor, ...]]]:
    """Rank and tensors of each file by torch's description, in the order of ranks; {} if none."""
    try:
        chunks = parse_metadata(description or b"").chunks
        found: dict[str, list[ShardTensor]] = {}
        for chunk in sorted(chunks, key=lambda each: each.start):
            found.setdefault(chunk.file, []).append(_shard(chunk))
    except (ForeignCheckpointError, ValueError, TypeError, RuntimeError, KeyError):
        return {}
    ranked = [(names.parse_payload(file), file) for file in found]
    return {
        file: (rank, tuple(found[file]))
        for rank, file in sorted((rank, file) for rank, file in ranked if rank is not None)
    }


def _shard(chunk: ForeignChunk) -> ShardTensor:
    frame = frame_of(getattr(torch, chunk.dtype), chunk.shape)
    return ShardTensor(
        name=chunk.name,
        dtype=chunk.dtype,
        global_shape=chunk.global_shape,
        offsets=chunk.offsets,
        shape=chunk.shape,
        byte_offset=chunk.start + len(frame.prefix),
        nbytes=chunk.nbytes,
        frame_offset=chunk.start,
        frame_nbytes=chunk.stop - chunk.start,
    )


def _of_record(record: PartRecord, *, is_certain: bool) -> SavedPart:
    return SavedPart(
        rank=record.rank,
        file=record.file,
        nbytes=record.nbytes,
        block_bytes=record.block_bytes,
        checksum=record.checksum,
        blocks=record.blocks,
        tensors=record.tensors,
        extra=record.extra,
        is_certain=is_certain,
    )


def _most_common(pattern: re.Pattern[str], text: str) -> int:
    """The number that a damaged record says most often; 0 where it says none."""
    found = Counter(int(match) for match in pattern.findall(text)).most_common(1)
    return found[0][0] if found else 0


def _sums(storage: Storage, path: str, nbytes: int, block_bytes: int) -> tuple[int, ...]:
    sums: list[int] = []
    for start in range(0, nbytes, _READ_BLOCKS * block_bytes):
        end = min(start + _READ_BLOCKS * block_bytes, nbytes)
        piece = storage.read_range(path, start, end)
        sums += block_checksums(CHECKSUM, memoryview(piece), block_bytes)
    return tuple(sums)


def _read(storage: Storage, path: str) -> bytes | None:
    try:
        return storage.read_bytes(path)
    except FileNotFoundError:
        return None
