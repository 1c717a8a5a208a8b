"""Files in a store, read in blocks that are kept on this machine's disk.

What was read is what was opened: a file's size and its mark (ETag, generation, time of the last
change) are noted when it is opened and looked up again after each read, so that bytes of a file
that was replaced meanwhile never get into the cache, nor into a batch. The cache has them by that
mark, so what it holds of an older file is never found. Blocks of a file without a mark are used by
the process that opened it alone.

Which bytes are read, and what they mean, does not belong here.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from checkpoint.errors import StorageUnavailableError
from checkpoint.storage.backend import FileVersion
from checkpoint.storage.drivers import missing_driver
from checkpoint.storage.reading import FileStore
from outlast.errors import SettingError
from outlast.remote.blocks import bytes_of, pieces
from outlast.remote.disk import BlockFolder
from outlast.remote.fetching import NUM_FETCHING, Fetchers, retry_for

# Sequences are read in an order that is shuffled over the whole corpus, so of a block of a corpus
# that is larger than the cache one sequence of some kilobytes is used before it is evicted: larger
# blocks would be traffic for nothing (docs/how-to/prepare-a-corpus.md has numbers). Smaller ones
# would be more requests and files than they save bytes.
BLOCK_BYTES = 256 << 10
# Of one call: storage that cannot send a piece in so long keeps no training fed.
CALL_DEADLINE_S = 20.0
# A store that restarts or throttles is back by then; a rank that waits longer looks hung.
PATIENCE_S = 120.0
# A file that is wanted whole is fetched in pieces of so many bytes.
_WHOLE_BYTES = 4 << 20


def files_of_node(data_dir: Path, cache_bytes: int) -> RemoteFiles:
    """What all processes of a node open remote files with: they share what is read."""
    return RemoteFiles(BlockFolder(data_dir / "blocks", max_bytes=cache_bytes))


@contextmanager
def files_of_command(cache_bytes: int, *, patience_s: float) -> Iterator[RemoteFiles]:
    """What a command opens remote files with; what it has read is deleted when it is done."""
    # A thread that still writes a block may hinder the deletion.
    with TemporaryDirectory(prefix="outlast-", ignore_cleanup_errors=True) as folder:
        cache = BlockFolder(Path(folder), max_bytes=cache_bytes)
        with closing(RemoteFiles(cache, patience_s=patience_s)) as files:
            yield files


class RemoteFiles:
    """Opens files by URL; `cache` keeps what is read of them, if there is one."""

    def __init__(
        self,
        cache: BlockFolder | None = None,
        *,
        block_bytes: int = BLOCK_BYTES,
        patience_s: float = PATIENCE_S,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> None:
        self.cache = cache
        self.block_bytes = block_bytes
        self.patience_s = patience_s
        self.fetchers = Fetchers()
        self._deadline_s = deadline_s
        self._stores: dict[str, FileStore] = {}

    def open(self, url: str) -> RemoteFile | None:
        """The file at a URL; None when there is none.

        Raises:
            ValueError: nothing can be read there, whenever it is tried.
            StorageUnavailableError: storage does not answer.
        """
        folder, _, name = url.rpartition("/")
        try:
            store = self._store(folder)
            version = retry_for(partial(store.version, name), patience_s=self.patience_s)
        except FileNotFoundError:
            return None
        except StorageUnavailableError as error:
            if not error.lasting:
                raise
            raise ValueError(f"cannot be read: {missing_driver(url) or error}") from error
        return RemoteFile(self, store, name, version)

    def close(self) -> None:
        """End the threads; files that were opened cannot be read any more."""
        self.fetchers.close()
        if self.cache is not None:
            self.cache.close()

    def _store(self, folder: str) -> FileStore:
        if folder not in self._stores:
            self._stores[folder] = FileStore(folder, deadline_s=self._deadline_s)
        return self._stores[folder]


class RemoteFile:
    """One file, as it was when it was opened. Thread-safe."""

    def __init__(
        self, files: RemoteFiles, store: FileStore, name: str, version: FileVersion
    ) -> None:
        self.url = f"{store.url}/{name}"
        self.size_bytes = version.nbytes
        self._files = files
        self._store = store
        self._name = name
        self._version = version
        # Without a mark, a file that replaced this one could not be told from it.
        mark = version.mark or uuid.uuid4().hex
        of = f"{self.url} {version.nbytes} {mark} {files.block_bytes}"
        self._key = hashlib.sha256(of.encode()).hexdigest()[:24]
        self._lock = threading.Lock()
        # Blocks that are being fetched.
        self._under_way: dict[int, Future[bytes]] = {}

    def read(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end`, of blocks that the cache keeps.

        Raises:
            StorageUnavailableError: storage does not answer.
            SettingError: the file is no longer the one that was opened.
        """
        wanted = pieces(start, min(end, self.size_bytes), block_bytes=self._files.block_bytes)
        # All of them are on their way before the first is waited for.
        found = [self._cached(piece.block) or self._begin(piece.block) for piece in wanted]
        blocks = [each if isinstance(each, bytes) else each.result() for each in found]
        return b"".join(
            block[piece.start : piece.end] for block, piece in zip(blocks, wanted, strict=True)
        )

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to fetch what will be read soon; what goes wrong is raised by the read."""
        cache = self._files.cache
        if cache is None or cache.is_unwritable:
            return
        size = self._files.block_bytes
        blocks = {
            piece.block: None
            for start, end in ranges
            for piece in pieces(start, min(end, self.size_bytes), block_bytes=size)
        }
        # What the cache has no room for would be evicted before it is read.
        if len(blocks) * size > cache.max_bytes // 2:
            return
        for block in blocks:
            if not cache.has(self._block_name(block)):
                self._begin(block)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Short ranges from all over the file, without the blocks around them; kept as one."""
        cache = self._files.cache
        of = hashlib.sha256(repr(list(ranges)).encode()).hexdigest()[:24]
        name, nbytes = f"{self._key}/ranges-{of}", sum(end - start for start, end in ranges)
        kept = None if cache is None else cache.read(name)
        if kept is None or len(kept) != nbytes:
            futures = [
                self._files.fetchers.submit(partial(self._fetch, *each, checks=False))
                for each in ranges
            ]
            kept = b"".join(future.result() for future in futures)
            self._confirm_unchanged()
            if cache is not None:
                cache.write(name, kept)
        found, at = [], 0
        for start, end in ranges:
            found.append(kept[at : at + end - start])
            at += end - start
        return found

    def whole(self) -> Path:
        """All of it, in a file of this machine that its processes share.

        Raises:
            SettingError: it is larger than the cache may be, or it has changed.
            OccupiedError: the disk has no room for it now.
            OSError: the disk fails.
            StorageUnavailableError: storage does not answer.
        """
        assert self._files.cache is not None, "whole files are kept in the cache"
        try:
            return self._files.cache.whole(f"{self._key}/{self._name}", self.size_bytes, self._copy)
        except ValueError as error:
            raise SettingError(f"data: {self.url} {error}") from error

    def _copy(self, into: BinaryIO) -> None:
        """Side by side, and no more in memory than are under way."""
        under_way: deque[Future[bytes]] = deque()
        for piece in pieces(0, self.size_bytes, block_bytes=_WHOLE_BYTES):
            part = bytes_of(piece.block, size=self.size_bytes, block_bytes=_WHOLE_BYTES)
            if len(under_way) == NUM_FETCHING:
                into.write(under_way.popleft().result())
            fetch = partial(self._fetch, *part, checks=False)
            under_way.append(self._files.fetchers.submit(fetch))
        for each in under_way:
            into.write(each.result())
        self._confirm_unchanged()

    def _block_name(self, block: int) -> str:
        return f"{self._key}/{block}"

    def _cached(self, block: int) -> bytes | None:
        cache = self._files.cache
        kept = None if cache is None else cache.read(self._block_name(block))
        start, end = bytes_of(block, size=self.size_bytes, block_bytes=self._files.block_bytes)
        return kept if kept is not None and len(kept) == end - start else None

    def _begin(self, block: int) -> Future[bytes]:
        """Have a block fetched, unless it is already."""
        with self._lock:
            if block not in self._under_way:
                work = partial(self._fetch_block, block)
                self._under_way[block] = self._files.fetchers.submit(work)
            return self._under_way[block]

    def _fetch_block(self, block: int) -> bytes:
        try:
            # It may have come while this waited for a thread, from another process, too.
            if (kept := self._cached(block)) is not None:
                return kept
            start, end = bytes_of(block, size=self.size_bytes, block_bytes=self._files.block_bytes)
            data = self._fetch(start, end)
            if self._files.cache is not None:
                self._files.cache.write(self._block_name(block), data)
            return data
        finally:
            with self._lock:
                self._under_way.pop(block, None)

    def _fetch(self, start: int, end: int, *, checks: bool = True) -> bytes:
        """Bytes from storage; `checks`: that they are of the file that was opened."""
        return retry_for(
            partial(self._try, start, end, checks=checks), patience_s=self._files.patience_s
        )

    def _try(self, start: int, end: int, *, checks: bool) -> bytes:
        try:
            data = self._store.read_range(self._name, start, end)
        except FileNotFoundError as error:
            raise self._changed("is gone") from error
        if checks or len(data) != end - start:
            # After the read: what was replaced before it is found.
            self._check_unchanged()
        if len(data) != end - start:
            raise StorageUnavailableError(
                f"storage {self._store.url}: gave {len(data):,} of the {end - start:,} bytes of "
                f"{self._name} from byte {start:,} on"
            )
        return data

    def _confirm_unchanged(self) -> None:
        retry_for(self._check_unchanged, patience_s=self._files.patience_s)

    def _check_unchanged(self) -> None:
        try:
            now = self._store.version(self._name)
        except FileNotFoundError as error:
            raise self._changed("is gone") from error
        if now != self._version:
            raise self._changed(
                f"had {self.size_bytes:,} bytes ({self._version.mark}), and has {now.nbytes:,} now "
                f"({now.mark})"
            )

    def _changed(self, how: str) -> SettingError:
        return SettingError(
            f"data: {self.url} has changed since this attempt began: it {how}; put back what the "
            "job began with, or give the new tokens a name of their own and submit a job with them"
        )
