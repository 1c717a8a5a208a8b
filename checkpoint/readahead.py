"""Verified bytes of a checkpoint, read in the background before they are asked for.

Threads hide the latency of a store; what they hold is bounded in bytes. Every
block is compared with its checksum before anybody sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from checkpoint.checksums import block_checksum
from checkpoint.core.manifest import Manifest
from checkpoint.core.names import attempt_folder
from checkpoint.core.reading import Unit
from checkpoint.errors import CorruptCheckpointError
from checkpoint.storage import Storage

# Requests under way at a time: an object store gives one of them 50 to 100 MB/s.
_NUM_THREADS = 4
# Four requests of 16 MiB under way, and as much again read and not yet taken.
READ_AHEAD_BYTES = 128 << 20


class ReadAhead:
    """The units that one rank reads, handed out in the order given. Not thread-safe."""

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        units: Sequence[Unit],
        *,
        max_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        self._storage = storage
        self._manifest = manifest
        self._folder = attempt_folder(manifest.step, manifest.attempt)
        self._left = deque(units)
        self._under_way: deque[tuple[Unit, Future[Tensor]]] = deque()
        self._num_bytes = 0
        self._max_bytes = max_bytes
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="checkpoint-read")
        self._submit()

    def take(self) -> Tensor:
        """The bytes of the next unit, in host memory.

        Raises:
            CorruptCheckpointError: the file is missing, or a block does not fit its checksum.
            StorageUnavailableError: the store did not answer.
        """
        unit, future = self._under_way.popleft()
        try:
            return future.result()
        finally:
            self._num_bytes -= unit.end - unit.start
            self._submit()

    def close(self) -> None:
        """Begin no further read; those under way end by the store's deadlines."""
        self._left.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check_size(self, part: int) -> None:
        """Raise CorruptCheckpointError unless the file of a part is as long as it should be."""
        record = self._manifest.parts[part]
        path = f"{self._folder}/{record.file}"
        try:
            nbytes = self._storage.size(path)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(self._manifest.step, f"{path} is missing") from error
        if nbytes != record.nbytes:
            raise CorruptCheckpointError(
                self._manifest.step, f"{path} has {nbytes} bytes, not {record.nbytes}"
            )

    def _submit(self) -> None:
        """Begin to read as much as fits, but one unit at least."""
        while self._left:
            nbytes = self._left[0].end - self._left[0].start
            if self._under_way and self._num_bytes + nbytes > self._max_bytes:
                return
            unit = self._left.popleft()
            self._num_bytes += nbytes
            self._under_way.append((unit, self._pool.submit(self._read, unit)))

    def _read(self, unit: Unit) -> Tensor:
        path = f"{self._folder}/{self._manifest.parts[unit.part].file}"
        problem = ""
        # A second read tells a bad transfer from bad bytes.
        for _ in range(2):
            try:
                raw = self._storage.read_range(path, unit.start, unit.end)
            except FileNotFoundError as error:
                raise CorruptCheckpointError(self._manifest.step, f"{path} is missing") from error
            problem = self._problem(unit, raw)
            if not problem:
                # torch wants memory that it could write to.
                return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        raise CorruptCheckpointError(self._manifest.step, f"{path}: {problem}")

    def _problem(self, unit: Unit, raw: bytes) -> str:
        """What is wrong with the bytes of a unit, "" when nothing is."""
        part = self._manifest.parts[unit.part]
        view = memoryview(raw)
        for index in range(unit.first_block, unit.first_block + unit.num_blocks):
            start, end = part.block_range(index)
            block = view[start - unit.start : end - unit.start]
            if len(block) != end - start:
                return f"bytes {start} to {end} are not all there"
            if block_checksum(part.checksum, block) != part.blocks[index]:
                return f"bytes {start} to {end} do not fit their checksum"
        return ""
