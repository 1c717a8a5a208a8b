"""Checkpoint storage by URL: the one place that knows fsspec.

Stores differ in how a file is created only if absent, and fsspec's generic call is a
check followed by a write. So each kind of store has its own way here; where none is
known, storage is refused unless the caller vouches that there is a single writer.

fsspec's own calls may never return (a server that accepts and does not answer was seen
to hold an s3fs upload for good). Calls that fsspec can cancel get a deadline here, so
that they leave no memory behind; the caller has a deadline for all of them.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import fsspec

from checkpoint.core import names
from checkpoint.errors import StorageUnavailableError
from checkpoint.storage.backend import Backend, Entry, FileVersion, FileWriter, Unfinished
from checkpoint.storage.drivers import missing_driver
from checkpoint.storage.hdfs import create_by_rename, has_rename
from checkpoint.storage.local import LocalFolder
from checkpoint.storage.multipart import MultipartWriter, left_open, uploads_below

# Loaded here and not at the first URL: a worker that restarts has inherited it then.
fsspec.get_filesystem_class("file")

_S3 = ("s3", "s3a")
_GOOGLE = ("gs", "gcs")
# Creates a file unless it exists, given a file system, a path and what to write; says
# whether it did.
Create = Callable[[Any, str, bytes], bool]
# S3 takes no smaller part than this, but for the last.
_S3_MIN_PART_BYTES = 5 << 20
# What stores say of a file that another one in its place would not have.
_MARKS = (
    *("ETag", "etag", "generation", "md5Hash", "VersionId", "LastModified", "updated"),
    *("mtime", "modificationTime", "modification_time", "last_modified", "created"),
)
# Of a call's deadline.
_CANCEL_SHARE = 0.9


def open_store(url: str, *, single_writer: bool, deadline_s: float) -> Backend:
    """The store at `url`.

    Raises:
        StorageUnavailableError: there is no such kind of store here, or it cannot create a
            file only if absent.
    """
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError, OSError) as error:
        why = missing_driver(url) or error
        raise StorageUnavailableError(f"checkpoint storage {url}: {why}", lasting=True) from error
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)
    if "file" in protocols:
        return LocalFolder(Path(root))
    if "memory" in protocols:
        return FsspecStore(fs, root, create=_create_in_memory, deadline_s=deadline_s)
    if any(protocol in _S3 for protocol in protocols):
        return S3Store(fs, root, create=_create_conditionally, deadline_s=deadline_s)
    if any(protocol in _GOOGLE for protocol in protocols):
        return FsspecStore(fs, root, create=_create_conditionally, deadline_s=deadline_s)
    if has_rename(fs):
        return HdfsStore(fs, root, create=create_by_rename, deadline_s=deadline_s, has_folders=True)
    if single_writer:
        return FsspecStore(
            fs, root, create=_create_unfenced, deadline_s=deadline_s, has_folders=True
        )
    raise StorageUnavailableError(
        f"checkpoint storage {url}: {protocols[0]} is not known to create a file only if absent, "
        "which keeps two attempts from mixing one checkpoint; use file, s3, gs, hdfs or webhdfs",
        lasting=True,
    )


class FsspecStore:
    """Any store that fsspec can reach."""

    def __init__(
        self,
        fs: Any,  # fsspec has no types
        root: str,
        *,
        create: Create,
        deadline_s: float,
        has_folders: bool = False,
    ) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._create = create
        # Object stores have none, and s3fs would make a bucket of a name misspelt.
        self._has_folders = has_folders
        # Only file systems on fsspec's event loop can cancel a call. It does so before the
        # deadline, so that the caller hears of it from a call that has come back.
        limit_s = _CANCEL_SHARE * deadline_s
        self._limit = {"timeout": limit_s} if getattr(fs, "async_impl", False) else {}
        if "webhdfs" in fs.protocol:
            # Its session of requests waits for ever otherwise.
            ask = type(fs.session).request
            fs.session.request = partial(ask, fs.session, timeout=limit_s)

    def read(self, path: str, start: int | None, end: int | None) -> bytes:
        return bytes(self._fs.cat_file(self._at(path), start=start, end=end, **self._limit))

    def read_into(self, path: str, start: int, into: memoryview) -> int:
        raw = self.read(path, start, start + len(into))
        into[: len(raw)] = raw
        return len(raw)

    def size(self, path: str) -> int:
        self._fs.invalidate_cache()
        return int(self._fs.info(self._at(path), **self._limit)["size"])

    def version(self, path: str) -> FileVersion:
        self._fs.invalidate_cache()
        info = self._fs.info(self._at(path), **self._limit)
        if info["type"] == "directory":
            raise FileNotFoundError(f"{path} is a folder")
        marks = (f"{key} {info[key]}" for key in _MARKS if info.get(key))
        return FileVersion(nbytes=int(info["size"]), mark=", ".join(marks))

    def writer(self, path: str, nbytes: int, part_bytes: int) -> FileWriter:
        self._make_parent(path)
        return _SequentialWriter(self._fs.open(self._at(path), "wb"))

    def create(self, path: str, data: bytes) -> bool:
        self._make_parent(path)
        return self._create(self._fs, self._at(path), data)

    def entries(self, path: str) -> list[Entry]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._at(path), detail=True, **self._limit)
        except FileNotFoundError:
            return []
        own = self._at(path).strip("/")
        return [
            Entry(
                name=str(info["name"]).rstrip("/").rpartition("/")[2],
                is_folder=info["type"] == "directory",
                nbytes=int(info.get("size") or 0),
                written_at_s=_written_at_s(info),
            )
            for info in found
            # Object stores that show folders list an empty one as an object within itself.
            if str(info["name"]).strip("/") != own
        ]

    def delete_file(self, path: str) -> None:
        self._fs.rm_file(self._at(path))

    def delete_folder(self, path: str) -> None:
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._at(path), recursive=True)

    def unfinished(self) -> list[Unfinished]:
        return []

    def discard(self, one: Unfinished) -> None:
        raise AssertionError(f"{one.path}: this store lists no unfinished files")

    def _make_parent(self, path: str) -> None:
        if self._has_folders:
            self._fs.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


class HdfsStore(FsspecStore):
    """HDFS: a record that is being created lies beside its final name."""

    def unfinished(self) -> list[Unfinished]:
        found = []
        for entry in self.entries(names.COMMITS):
            draft = names.parse_draft(entry.name)
            if draft is not None:
                found.append(
                    Unfinished(
                        path=f"{names.COMMITS}/{draft[0]}",
                        token=draft[1],
                        begun_at_s=entry.written_at_s,
                    )
                )
        return found

    def discard(self, one: Unfinished) -> None:
        folder, _, name = one.path.rpartition("/")
        with contextlib.suppress(FileNotFoundError):
            self.delete_file(f"{folder}/{names.draft_name(name, one.token)}")


class S3Store(FsspecStore):
    """An S3 bucket: large files go in parts, side by side."""

    def writer(self, path: str, nbytes: int, part_bytes: int) -> FileWriter:
        if nbytes <= part_bytes:
            return _PutWriter(partial(self._fs.pipe_file, self._at(path), **self._limit))
        if part_bytes < _S3_MIN_PART_BYTES:
            return super().writer(path, nbytes, part_bytes)
        bucket, key, _ = self._fs.split_path(self._at(path))
        upload = left_open(partial(self._call, Bucket=bucket), key)
        return MultipartWriter(partial(self._call, Bucket=bucket, Key=key), upload)

    def unfinished(self) -> list[Unfinished]:
        bucket, prefix, _ = self._fs.split_path(self._at(""))
        return [
            Unfinished(
                path=str(upload["Key"]).removeprefix(f"{prefix}/"),
                token=str(upload["UploadId"]),
                begun_at_s=_seconds(upload.get("Initiated")),
            )
            for upload in uploads_below(partial(self._call, Bucket=bucket), f"{prefix}/")
        ]

    def discard(self, one: Unfinished) -> None:
        bucket, key, _ = self._fs.split_path(self._at(one.path))
        with contextlib.suppress(FileNotFoundError):
            self._call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=one.token)

    def _call(self, method: str, **fields: Any) -> Any:  # what botocore parsed
        return self._fs.call_s3(method, **fields, **self._limit)


class _PutWriter:
    """An S3 object of one part, which is there as soon as that is written."""

    takes_any_order = True

    def __init__(self, put: Callable[[bytes], object]) -> None:
        self._put = put
        self._is_put = False

    def write(self, index: int, chunk: memoryview) -> None:
        self._put(bytes(chunk))
        self._is_put = True

    def finish(self) -> None:
        if not self._is_put:
            self._put(b"")

    def abort(self) -> None:
        """Nothing was begun that is not whole."""


class _SequentialWriter:
    """One of fsspec's files."""

    takes_any_order = False

    def __init__(self, file: Any) -> None:  # one of fsspec's
        self._file = file

    def write(self, index: int, chunk: memoryview) -> None:
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
    for key in ("modificationTime", "modification_time"):
        if key in info:
            # HDFS counts milliseconds.
            return float(info[key]) / 1000
    for key in ("mtime", "LastModified", "updated", "last_modified", "created"):
        found = _seconds(info.get(key))
        if found is not None:
            return found
    return None


def _seconds(value: Any) -> float | None:
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(value).timestamp()
    return None
