"""The edge to storage: a job's checkpoint root, and every call to it with a deadline.

Stores and mounts can hang for good (an object store that accepts a connection and
never answers was seen to), so a call runs in a thread of its own which is left
behind when it does not come back.

A checkpoint exists when its commit record does, and the record is created only
if absent.

What does not belong here: kinds of stores (`stores.py`), how large files are sent
(`upload/transfer.py`), what to upload, and what to delete.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from checkpoint.core import names
from checkpoint.core.checked_json import RecordError, sha256
from checkpoint.core.manifest import CommitRecord, Manifest
from checkpoint.errors import (
    CorruptCheckpointError,
    StorageTimeoutError,
    StorageUnavailableError,
)
from checkpoint.storage.backend import Entry, FileWriter, Unfinished
from checkpoint.storage.hung import MAX_HUNG_CALLS, CallWatch, num_hung, store_of, tried
from checkpoint.storage.stores import open_store
from outlast.crashpoints import CrashPoint, reach

__all__ = ["CorruptCheckpointError", "Storage", "StorageUnavailableError"]

# One call moves a part of 32 MiB at most, beside three others: a store of 2 MB/s can do that.
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

_Result = TypeVar("_Result")


class _Call(Protocol):
    """Does one piece of work within the deadline; see `Storage._call`."""

    def __call__(self, what: str, path: str, work: Callable[[], _Result]) -> _Result: ...


class Storage:
    """A job's checkpoint root, an fsspec URL or a path. Thread-safe.

    `single_writer` allows stores that cannot create a file only if absent.

    Raises:
        StorageUnavailableError: there is no such kind of store here.
    """

    called = "checkpoint storage"

    def __init__(
        self, url: str, *, single_writer: bool = False, deadline_s: float = CALL_DEADLINE_S
    ) -> None:
        self.url = url
        self._deadline_s = deadline_s
        self._store = store_of(url)
        self._closed = threading.Event()
        self._backend = open_store(url, single_writer=single_writer, deadline_s=deadline_s)

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

    def read_into(self, path: str, start: int, into: memoryview) -> int:
        """Fill `into` from byte `start` of a file on; says how much of it, less at its end.

        A call that did not come back in time may fill it later: use it for nothing else then.

        Raises:
            FileNotFoundError: there is no such file.
        """
        return self._call("read", path, lambda: self._backend.read_into(path, start, into))

    def read_bytes(self, path: str) -> bytes:
        """A whole small file; FileNotFoundError when there is none."""
        return self._call("read", path, lambda: self._backend.read(path, None, None))

    def size(self, path: str) -> int:
        """Bytes of a file; FileNotFoundError when there is none."""
        return self._call("look up", path, lambda: self._backend.size(path))

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a small file, replacing one that exists."""
        size = max(1, len(data))
        self.write_chunks(path, [memoryview(data)], nbytes=len(data), part_bytes=size)

    def write_chunks(
        self, path: str, chunks: Iterable[memoryview], *, nbytes: int, part_bytes: int
    ) -> None:
        """Write a file of `nbytes` in chunks of `part_bytes`; it appears when it is whole."""
        writer = self.writer(path, nbytes, part_bytes)
        try:
            for index, chunk in enumerate(chunks):
                writer.write(index, chunk)
            writer.finish()
        except BaseException:
            writer.abort()
            raise

    def writer(self, path: str, nbytes: int, part_bytes: int) -> BoundedWriter:
        """Begin to write a file of `nbytes`, in parts of `part_bytes`."""
        writer = self._call("write", path, lambda: self._backend.writer(path, nbytes, part_bytes))
        return BoundedWriter(path, writer, self._call)

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
        reach(CrashPoint.COMMIT_DELETED)
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

    def now_s(self) -> float:
        """The time by the store's own clock, which tells when its files were written.

        This machine's where the store does not say; then it says no file's time either.
        """
        # Named as what is not finished is, so that one left by a crash is swept up.
        name = names.draft_name("clock", uuid.uuid4().hex)
        path = f"{names.COMMITS}/{name}"
        self.write_bytes(path, b"")
        try:
            for entry in self.entries(names.COMMITS):
                if entry.name == name and entry.written_at_s is not None:
                    return entry.written_at_s
        finally:
            self.delete_file(path)
        return time.time()

    def unfinished(self) -> list[Unfinished]:
        """Files that were begun and neither finished nor given up, on stores that list them."""
        return self._call("list", "unfinished files", self._backend.unfinished)

    def discard(self, one: Unfinished) -> None:
        """Free what an unfinished file takes."""
        self._call("delete", one.path, lambda: self._backend.discard(one))

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
        # An empty folder may stay a while on object stores that have folders underneath.
        if self.entries(folder):
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

    def _failure(
        self, what: str, path: str, reason: str, *, lasting: bool = True
    ) -> StorageUnavailableError:
        return StorageUnavailableError(
            f"{self.called} {self.url}: cannot {what} {path}: {reason}", lasting=lasting
        )

    def _call(self, what: str, path: str, work: Callable[[], _Result]) -> _Result:
        """Run `work` within the deadline; a missing file is the caller's business."""
        outcome: queue.SimpleQueue[tuple[_Result | None, BaseException | None]]
        outcome = queue.SimpleQueue()
        self._check_hung(what, path)
        watch = CallWatch(self._store)

        def run() -> None:
            try:
                outcome.put(tried(work))
            finally:
                watch.come_back()

        try:
            threading.Thread(target=run, name="checkpoint-storage", daemon=True).start()
        except RuntimeError as no_thread:
            # The limit of threads here says nothing about the store; there may be one later.
            raise self._failure(what, path, str(no_thread), lasting=False) from no_thread
        try:
            result, error = self._wait(outcome, f"cannot {what} {path}")
        except StorageTimeoutError:
            watch.leave()
            raise
        try:
            if error is None:
                return result  # type: ignore[return-value]  # None only where work() gave None
            is_missing = isinstance(error, FileNotFoundError) and what in _MAY_MISS
            if is_missing or not isinstance(error, Exception):
                raise error
            # A client that gives up by itself has left nothing behind, and may be asked again.
            timed_out = isinstance(error, TimeoutError)
            reason = f"no answer in {self._deadline_s:g} s" if timed_out else _reason(error)
            raise self._failure(what, path, reason, lasting=_is_lasting(error)) from error
        finally:
            # Raised again it knows this frame: until garbage is collected both would stay, and
            # the host memory that callers hold.
            error = None

    def _check_hung(self, what: str, path: str) -> None:
        """Make no more calls to a store that never answers: each would cost a thread for good."""
        if num_hung(self._store) >= MAX_HUNG_CALLS:
            raise StorageTimeoutError(
                f"{self.called} {self.url}: cannot {what} {path}: {MAX_HUNG_CALLS} calls to "
                f"{self._store} have not come back, and no more are made until one of them does; "
                "restart this process once the store answers again",
                lasting=True,
            )

    def _wait(self, outcome: queue.SimpleQueue[_Result], failing: str) -> _Result:
        limit_s = self._deadline_s
        deadline_s = time.monotonic() + limit_s
        while not self._closed.is_set():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise StorageTimeoutError(
                    f"{self.called} {self.url}: {failing}: no answer in {limit_s:g} s"
                )
            with contextlib.suppress(queue.Empty):
                return outcome.get(timeout=min(left_s, _CLOSE_CHECK_S))
        raise StorageTimeoutError(f"{self.called} {self.url}: {failing}: it was closed")


class BoundedWriter:
    """A file being written, each call within the storage's deadline.

    Its calls raise StorageUnavailableError. It does not exist before `finish`.
    """

    def __init__(self, path: str, writer: FileWriter, call: _Call) -> None:
        self.path = path
        self._writer = writer
        self._call = call
        self._is_hung = False

    @property
    def takes_any_order(self) -> bool:
        """Whether parts may be written side by side, and again after a failure."""
        return self._writer.takes_any_order

    def write(self, index: int, chunk: memoryview) -> None:
        """Write one part.

        Raises:
            StorageTimeoutError: it did not come back. The file can only be given up.
        """
        self._bounded(lambda: self._writer.write(index, chunk))

    def finish(self) -> None:
        """Make it exist; all parts are written."""
        self._bounded(self._writer.finish)

    def abort(self) -> None:
        """Free what it takes, as far as storage does that. Raises nothing.

        After a call that did not come back nothing is done: closing a file that its thread
        still has would give its number to another file, for the thread to write into when
        it wakes up. The sweep of unfinished files comes later.
        """
        if not self._is_hung:
            with contextlib.suppress(StorageUnavailableError):
                self._call("clean up", self.path, self._writer.abort)

    def _bounded(self, work: Callable[[], None]) -> None:
        try:
            self._call("write", self.path, work)
        except StorageTimeoutError:
            self._is_hung = True
            raise


def _is_lasting(error: Exception) -> bool:
    """Whether a second try a moment later meets the same; s3fs leaves out some numbers."""
    if isinstance(error, PermissionError | FileExistsError):
        return True
    return isinstance(error, OSError) and error.errno in _LASTING


def _reason(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"
