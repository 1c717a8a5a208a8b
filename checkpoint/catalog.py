"""What people do with checkpoints in storage: list, verify, copy and remove them.

What does not belong here: printing (`outlast/cli/checkpoints.py`), and loading one into
a model (`restore/`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from checkpoint.checksums import block_checksums
from checkpoint.core import names
from checkpoint.core.manifest import CommitRecord, Manifest, PartRecord
from checkpoint.core.pacing import DEFAULT_LIMITS, MAX_PARALLEL
from checkpoint.errors import CorruptCheckpointError
from checkpoint.storage.leases import leased_steps, pinned_steps, reading
from checkpoint.storage.root_owner import owner_problem
from checkpoint.storage.storage import Storage
from checkpoint.torch_format.describe import check_description
from checkpoint.upload.cleaning import metric_of
from outlast.errors import FatalError

# Hears how many bytes more have been dealt with.
OnBytes = Callable[[int], None]


class RefusedError(FatalError):
    """What was asked for would lose a checkpoint that is still needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A checkpoint as a listing shows it; `problem` says why its records cannot be read."""

    step: int
    attempt: int | None
    size_bytes: int | None
    num_parts: int | None
    world_size: int | None
    # Of the newest evaluation on held-out samples up to this step.
    eval_loss: float | None
    written_at_s: float | None
    is_pinned: bool
    is_read: bool
    problem: str = ""


def listing(storage: Storage) -> list[Listed]:
    """Every checkpoint that exists, newest first."""
    pinned = pinned_steps(storage)
    # Only shown, never acted on: this machine's clock is good enough.
    leased = leased_steps(storage, now_s=time.time())
    times = {entry.name: entry.written_at_s for entry in storage.entries(names.COMMITS)}
    found = []
    for step in storage.committed_steps():
        commit, manifest, problem = _records(storage, step)
        found.append(
            Listed(
                step=step,
                attempt=None if commit is None else commit.attempt,
                size_bytes=None if commit is None else commit.size_bytes,
                num_parts=None if manifest is None else len(manifest.parts),
                world_size=None if commit is None else commit.world_size,
                eval_loss=None if manifest is None else metric_of(manifest),
                written_at_s=times.get(names.commit_path(step).rpartition("/")[2]),
                is_pinned=step in pinned,
                is_read=step in leased,
                problem=problem,
            )
        )
    return found


def verify(storage: Storage, step: int, on_bytes: OnBytes) -> list[str]:
    """Read every byte of a checkpoint; returns what is wrong with it, nothing when it is whole.

    The record that says whose root it is counts as a part of each.

    Raises:
        StorageUnavailableError: storage does not answer, so nothing can be said.
    """
    problem = owner_problem(storage)
    problems = [problem] if problem else []
    with reading(storage, step):
        try:
            _, manifest = storage.read_commit(step)
        except CorruptCheckpointError as error:
            return [*problems, error.what]
        folder = names.attempt_folder(step, manifest.attempt)
        try:
            check_description(storage, manifest)
        except CorruptCheckpointError as error:
            problems.append(error.what)
        for part in manifest.parts:
            try:
                for piece in _verified_pieces(storage, folder, part):
                    on_bytes(len(piece))
            except CorruptCheckpointError as error:
                problems.append(error.what)
        return problems


def copy(source: Storage, step: int, target: Storage, on_bytes: OnBytes) -> None:
    """Make the checkpoint of `step` exist in `target` too; every byte is verified on its way.

    It exists there when all of it has arrived, and not before.

    Raises:
        CorruptCheckpointError: it is not whole in `source`.
        RefusedError: `target` has another checkpoint of that step.
        StorageUnavailableError: one of both does not answer.
    """
    with reading(source, step):
        commit, manifest = source.read_commit(step)
        path = names.commit_path(step)
        if step in target.committed_steps():
            if target.read_bytes(path) == commit.to_json():
                return
            raise RefusedError(
                f"{target.url} has another checkpoint of step {step}: remove that first"
            )
        folder = names.attempt_folder(step, commit.attempt)
        for part in manifest.parts:
            _copy_payload(source, target, folder, part, on_bytes)
        if manifest.metadata_sha256:
            check_description(source, manifest)
            described = f"{folder}/{names.METADATA}"
            target.write_bytes(described, source.read_bytes(described))
        target.write_bytes(f"{folder}/{names.MANIFEST}", manifest.to_json())
        if not target.put_if_absent(path, commit.to_json()):
            raise RefusedError(f"{target.url}: somebody else has just committed step {step}")


def remove(storage: Storage, steps: Sequence[int], *, force: bool) -> None:
    """Delete checkpoints, all of these or none.

    Raises:
        RefusedError: one does not exist, or is needed and `force` does not say so.
    """
    found = {one.step: one for one in listing(storage)}
    newest_whole = next((one.step for one in found.values() if not one.problem), None)
    for step in steps:
        if step not in found:
            known = ", ".join(str(other) for other in found) or "none"
            raise RefusedError(f"{storage.url}: no checkpoint of step {step} (there: {known})")
        reasons = [
            reason
            for reason, holds in (
                ("it is the newest that can be loaded", step == newest_whole),
                ("it is pinned", found[step].is_pinned),
                ("somebody is reading it", found[step].is_read),
            )
            if holds
        ]
        if reasons and not force:
            raise RefusedError(
                f"checkpoint step {step} is kept: {' and '.join(reasons)}; --force removes it "
                "all the same"
            )
    for step in steps:
        storage.delete_step(step)
        storage.delete_file(names.pin_path(step))


def _records(storage: Storage, step: int) -> tuple[CommitRecord | None, Manifest | None, str]:
    try:
        return *storage.read_commit(step), ""
    except CorruptCheckpointError as error:
        return None, None, error.what


def _copy_payload(
    source: Storage, target: Storage, folder: str, part: PartRecord, on_bytes: OnBytes
) -> None:
    def counted() -> Iterator[memoryview]:
        for piece in _verified_pieces(source, folder, part):
            yield memoryview(piece)
            on_bytes(len(piece))

    target.write_chunks(
        f"{folder}/{part.file}",
        counted(),
        nbytes=part.nbytes,
        part_bytes=DEFAULT_LIMITS.part_bytes(part.nbytes),
    )


def _verified_pieces(storage: Storage, folder: str, part: PartRecord) -> Iterator[bytes]:
    """The file of a part in pieces of an upload's size; some are read ahead.

    Raises:
        CorruptCheckpointError: the file is missing, of another size, or damaged.
    """
    path = f"{folder}/{part.file}"
    try:
        nbytes = storage.size(path)
    except FileNotFoundError as error:
        raise CorruptCheckpointError(part.step, f"{path} is missing") from error
    if nbytes != part.nbytes:
        raise CorruptCheckpointError(part.step, f"{path} has {nbytes} bytes, not {part.nbytes}")
    size = DEFAULT_LIMITS.part_bytes(nbytes)
    starts = deque(range(0, nbytes, size))
    ahead: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix="checkpoint-read") as pool:
        while starts or ahead:
            while starts and len(ahead) < MAX_PARALLEL:
                start = starts.popleft()
                end = min(start + size, nbytes)
                ahead.append(pool.submit(_read_verified, storage, path, part, (start, end)))
            yield ahead.popleft().result()


def _read_verified(storage: Storage, path: str, part: PartRecord, place: tuple[int, int]) -> bytes:
    start, end = place
    problem = ""
    # A second read tells a bad transfer from bad bytes.
    for _ in range(2):
        try:
            piece = storage.read_range(path, start, end)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(part.step, f"{path} is missing") from error
        problem = _damage(part, piece, start, end)
        if not problem:
            return piece
    raise CorruptCheckpointError(part.step, f"{path}: {problem}")


def _damage(part: PartRecord, piece: bytes, start: int, end: int) -> str:
    """What is wrong with bytes `start` to `end` of a part's file; they begin with a block."""
    if len(piece) != end - start:
        return f"bytes {start} to {end} are not all there"
    sums = block_checksums(part.checksum, memoryview(piece), part.block_bytes)
    for index, found in enumerate(sums, start // part.block_bytes):
        if found != part.blocks[index]:
            first, last = part.block_range(index)
            return f"bytes {first} to {last} do not fit their checksum"
    return ""
