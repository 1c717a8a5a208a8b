"""The edge to storage: the one place that knows fsspec.

Every call has a deadline. Stores and mounts can hang for good (an object store
that accepts a connection and never answers was seen to), so a call runs in a
thread of its own which is left behind when it does not come back.

A checkpoint exists when its commit record does, and the record is created only
if absent. Stores differ in how, and fsspec's generic call is a check followed by
a write, so each kind of store has its own way here; where none is known, storage
is refused unless the caller vouches that there is a single writer.

What does not belong here: what to upload, and what to delete.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from checkpoint.backend import Backend, Entry, FileWriter, LocalFolder
from checkpoint.core import names
from checkpoint.core.manifest import CommitRecord, Manifest
from checkpoint.core.sealed import RecordError, sha256
from checkpoint.errors import (
    CorruptCheckpointError,
    StorageTimeoutError,
    StorageUnavailableError,
)

__all__ = ["CorruptCheckpointError", "Storage", "StorageUnavailableError"]

# Loaded here and not at the first URL: a worker that restarts has inherited it then.
fsspec.get_filesystem_class("file")

# One call moves a block at most: this is ten times what a slow store (10 MB/s) needs.
CALL_DEADLINE_S = 60.0
# How soon a waiting call sees that the storage was closed.
_CLOSE_CHECK_S = 0.2
# Failures that a second try a moment later meets again.
_LASTING = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS}
    | {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
# Where a missing file is an answer; elsewhere it is a folder that cannot be made.
_MAY_MISS = ("read", "look up", "delete")
_S3 = ("s3", "s3a")
_GOOGLE = ("gs", "gcs")

_Result = TypeVar("_Result")


class Storage:
    """A job's checkpoint root, an fsspec URL or a path. Thread-safe.

    `single_writer` allows stores that cannot create a file only if absent.

    Raises:
        StorageUnavailableError: there is no such kind of store here.
    """

    def __init__(
        self, url: str, *, single_writer: bool = False, deadline_s: float = CALL_DEADLINE_S
    ) -> None:
        self.url = url
        self._deadline_s = deadline_s
        self._closed = threading.Event()
        self._backend = _open(url, single_writer=single_writer)

    def close(self) -> None:
        """Fail every call from now on, those under way too: whoever waits must end soon."""
        self._closed.set()

    def committed_steps(self) -> list[int]:
        """Steps of the checkpoints that exist, newest first."""
        steps = [names.parse_commit(entry.name) for entry in self.entries(names.COMMITS)]
        return sorted((step for step in steps if step is not None), reverse=True)

    def read_commit(self, step: int) -> tuple[CommitRecord, Manifest]:
        """A checkpoint's records, verified against each other.

        Raises:
            CorruptCheckpointError: a record is missing, damaged, or not of this step.
        """
        commit_path = names.commit_path(step)
        commit = self._read_record(step, commit_path, CommitRecord.from_json)
        manifest_path = f"{names.attempt_folder(step, commit.attempt)}/{names.MANIFEST}"

        def parse(raw: bytes) -> Manifest:
            if sha256(raw) != commit.manifest_sha256:
                raise RecordError(f"is not the manifest that {commit_path} names")
            return Manifest.from_json(raw)

        manifest = self._read_record(step, manifest_path, parse)
        if (commit.step, manifest.step, manifest.attempt) != (step, step, commit.attempt):
            raise CorruptCheckpointError(step, f"{commit_path}: is of another step or attempt")
        return commit, manifest

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of a file; fewer when it is shorter.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return self._call("read", path, lambda: self._backend.read(path, start, end))

    def read_bytes(self, path: str) -> bytes:
        """A whole small file; FileNotFoundError when there is none."""
        return self._call("read", path, lambda: self._backend.read(path, None, None))

    def size(self, path: str) -> int:
        """Bytes of a file; FileNotFoundError when there is none."""
        return self._call("look up", path, lambda: self._backend.size(path))

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a small file, replacing one that exists."""
        self.write_chunks(path, [memoryview(data)])

    def write_chunks(self, path: str, chunks: Iterable[memoryview]) -> None:
        """Write a file chunk by chunk; it appears when it is whole."""
        writer = self._call("write", path, lambda: self._backend.writer(path))
        try:
            for chunk in chunks:
                self._call("write", path, partial(writer.write, chunk))
            self._call("write", path, writer.finish)
        except StorageTimeoutError:
            # The thread that hangs still has the file: closing it would give its number to
            # another file, for that thread to write into when it wakes up.
            raise
        except BaseException:
            with contextlib.suppress(StorageUnavailableError):
                self._call("clean up", path, writer.abort)
            raise

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create a small file; says whether it now is what was given.

        False when another writer was first. A file that holds exactly `data` counts as
        ours: a store's client may have sent the same request twice.
        """
        if self._call("create", path, lambda: self._backend.create(path, data)):
            return True
        try:
            return self.read_bytes(path) == data
        except FileNotFoundError:
            return False

    def entries(self, path: str) -> list[Entry]:
        """Files and folders right below a folder; none when it does not exist."""
        return self._call("list", path or ".", lambda: self._backend.entries(path))

    def delete_step(self, step: int) -> None:
        """Delete a checkpoint: first its commit record, so that none exists without its data."""
        self.delete_file(names.commit_path(step))
        for entry in self.entries(""):
            parsed = names.parse_attempt_folder(entry.name)
            if parsed is not None and parsed[0] == step:
                self.delete_folder(entry.name)

    def delete_file(self, path: str) -> None:
        """Delete a file; nothing happens when there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._call("delete", path, lambda: self._backend.delete_file(path))

    def delete_folder(self, path: str) -> None:
        """Delete a folder and all it holds; nothing happens when there is none."""
        self._call("delete", path, lambda: self._backend.delete_folder(path))

    def quarantine_step(self, step: int) -> None:
        """Make a corrupt checkpoint not exist, but keep its bytes for people to look at.

        The step can then be committed again by a later attempt.
        """
        path = names.commit_path(step)
        try:
            raw = self.read_bytes(path)
        except FileNotFoundError:
            return
        try:
            attempt = CommitRecord.from_json(raw).attempt
        except RecordError:
            # Zero is no attempt: counting starts at one.
            attempt = 0
        self.write_bytes(names.quarantine_path(step, attempt), raw)
        self.delete_file(path)

    def probe(self) -> None:
        """Write, read back, refuse to replace, and delete a small file.

        Raises:
            StorageUnavailableError: one of these does not work here; says which and why.
        """
        folder = f".probe-{uuid.uuid4().hex}"
        path, data = f"{folder}/probe", uuid.uuid4().bytes
        try:
            if not self.put_if_absent(path, data):
                raise self._failure("create", path, "it is said to exist already")
            if self.read_bytes(path) != data:
                raise self._failure("read back", path, "other bytes than were written")
            if self.put_if_absent(path, b"other"):
                raise self._failure("create", path, "it replaced a file that exists")
        except FileNotFoundError as error:
            raise self._failure("read back", path, "it vanished") from error
        finally:
            with contextlib.suppress(StorageUnavailableError):
                self.delete_folder(folder)
        if any(entry.name == folder for entry in self.entries("")):
            raise self._failure("delete", path, "it is still there")

    def _read_record(self, step: int, path: str, parse: Callable[[bytes], _Result]) -> _Result:
        """A record, read a second time before it is called damaged."""
        for is_last in (False, True):
            try:
                return parse(self.read_bytes(path))
            except FileNotFoundError as error:
                raise CorruptCheckpointError(step, f"{path} is missing") from error
            except RecordError as error:
                if is_last:
                    raise CorruptCheckpointError(step, f"{path}: {error}") from error
        raise AssertionError("the loop returns or raises")

    def _failure(self, what: str, path: str, reason: str) -> StorageUnavailableError:
        return StorageUnavailableError(
            f"checkpoint storage {self.url}: cannot {what} {path}: {reason}", lasting=True
        )

    def _call(self, what: str, path: str, work: Callable[[], _Result]) -> _Result:
        """Run `work` within the deadline; a missing file is the caller's business."""
        outcome: queue.SimpleQueue[tuple[_Result | None, BaseException | None]]
        outcome = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put((work(), None))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                outcome.put((None, error))

        threading.Thread(target=run, name="checkpoint-storage", daemon=True).start()
        result, error = self._wait(outcome, f"cannot {what} {path}")
        if error is None:
            return result  # type: ignore[return-value]  # None only where work() gave None
        is_missing = isinstance(error, FileNotFoundError) and what in _MAY_MISS
        if is_missing or not isinstance(error, Exception):
            raise error
        number = error.errno if isinstance(error, OSError) else None
        raise StorageUnavailableError(
            f"checkpoint storage {self.url}: cannot {what} {path}: {_reason(error)}",
            lasting=number in _LASTING,
        ) from error

    def _wait(self, outcome: queue.SimpleQueue[_Result], failing: str) -> _Result:
        limit_s = self._deadline_s
        deadline_s = time.monotonic() + limit_s
        while not self._closed.is_set():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise StorageTimeoutError(
                    f"checkpoint storage {self.url}: {failing}: no answer in {limit_s:g} s"
                )
            with contextlib.suppress(queue.Empty):
                return outcome.get(timeout=min(left_s, _CLOSE_CHECK_S))
        raise StorageTimeoutError(f"checkpoint storage {self.url}: {failing}: it was closed")


class _FsspecStore:
    """Any store that fsspec can reach."""

    def __init__(
        self,
        fs: Any,  # fsspec has no types
        root: str,
        create: Callable[[Any, str, bytes], bool],
        *,
        has_folders: bool = False,
    ) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._create = create
        # Object stores have none, and s3fs would make a bucket of a name misspelt.
        self._has_folders = has_folders

    def read(self, path: str, start: int | None, end: int | None) -> bytes:
        return bytes(self._fs.cat_file(self._at(path), start=start, end=end))

    def size(self, path: str) -> int:
        self._fs.invalidate_cache()
        return int(self._fs.info(self._at(path))["size"])

    def writer(self, path: str) -> FileWriter:
        self._make_parent(path)
        return _FsspecWriter(self._fs.open(self._at(path), "wb"))

    def create(self, path: str, data: bytes) -> bool:
        self._make_parent(path)
        return self._create(self._fs, self._at(path), data)

    def entries(self, path: str) -> list[Entry]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._at(path), detail=True)
        except FileNotFoundError:
            return []
        return [
            Entry(
                name=str(info["name"]).rstrip("/").rpartition("/")[2],
                is_folder=info["type"] == "directory",
                nbytes=int(info.get("size") or 0),
                written_at_s=_written_at_s(info),
            )
            for info in found
        ]

    def delete_file(self, path: str) -> None:
        self._fs.rm_file(self._at(path))

    def delete_folder(self, path: str) -> None:
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(path), recursive=True)

    def _make_parent(self, path: str) -> None:
        if self._has_folders:
            self._fs.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


class _FsspecWriter:
    def __init__(self, file: Any) -> None:  # one of fsspec's
        self._file = file

    def write(self, chunk: memoryview) -> None:
        self._file.write(chunk)

    def finish(self) -> None:
        self._file.close()

    def abort(self) -> None:
        # Closing, which a garbage collector does too, would make what is there a file.
        discard = getattr(self._file, "discard", None)
        if discard is not None:
            discard()
        with contextlib.suppress(AttributeError):
            self._file.closed = True


def _open(url: str, *, single_writer: bool) -> Backend:
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        raise StorageUnavailableError(f"checkpoint storage {url}: {error}", lasting=True) from error
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
    if "file" in protocols:
        return LocalFolder(Path(root))
    if "memory" in protocols:
        return _FsspecStore(fs, root, _create_in_memory)
    if any(protocol in (*_S3, *_GOOGLE) for protocol in protocols):
        return _FsspecStore(fs, root, _create_conditionally)
    if single_writer:
        return _FsspecStore(fs, root, _create_unfenced, has_folders=True)
    raise StorageUnavailableError(
        f"checkpoint storage {url}: {protocols[0]} is not known to create a file only if absent, "
        "which keeps two attempts from mixing one checkpoint; use file, s3 or gs",
        lasting=True,
    )


_memory_lock = threading.Lock()


def _create_in_memory(fs: Any, path: str, data: bytes) -> bool:
    with _memory_lock:
        return _create_unfenced(fs, path, data)


def _create_unfenced(fs: Any, path: str, data: bytes) -> bool:
    if fs.exists(path):
        return False
    fs.pipe_file(path, data)
    return True


def _create_conditionally(fs: Any, path: str, data: bytes) -> bool:
    """S3 `If-None-Match: *`, Google `ifGenerationMatch=0`."""
    try:
        fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    except OSError as error:
        # s3fs reports a failed precondition as EINVAL where the server names no condition.
        if error.errno != errno.EINVAL or not fs.exists(path):
            raise
        return False
    return True


def _written_at_s(info: dict[str, Any]) -> float | None:
    """Stores disagree on the name and the type of a file's time."""
    for key in ("mtime", "LastModified", "updated", "last_modified", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
    return None


def _reason(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"
