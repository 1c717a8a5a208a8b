"""Verified bytes of a checkpoint, read in the background before they are asked for.

Threads hide the latency of a store; what they hold is bounded by the buffers of a pool.
Every block is compared with its checksum before anybody sees it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from checkpoint.checksums import block_checksum
from checkpoint.core.manifest import Manifest
from checkpoint.core.names import attempt_folder
from checkpoint.core.reading import Unit
from checkpoint.errors import CorruptCheckpointError
from checkpoint.restore.sharing import NUM_READING, Buffer, Pool
from checkpoint.stage.hostcopy import host_bytes
from checkpoint.storage.storage import Storage


class ReadAhead:
    """The units that one rank reads, handed out in the order given. Not thread-safe."""

    def __init__(
        self, storage: Storage, manifest: Manifest, units: Sequence[Unit], pool: Pool
    ) -> None:
        self._storage = storage
        self._manifest = manifest
        self._folder = attempt_folder(manifest.step, manifest.attempt)
        self._left = deque(units)
        self._under_way: deque[Future[Buffer]] = deque()
        self._buffers = pool
        self._pool = ThreadPoolExecutor(NUM_READING, thread_name_prefix="checkpoint-read")
        self._submit()

    def take(self) -> Buffer:
        """The bytes of the next unit, in host memory; `give_back` them.

        Raises:
            CorruptCheckpointError: the file is missing, or a block does not fit its checksum.
            StorageUnavailableError: the store did not answer.
        """
        if not self._under_way:
            raise AssertionError("buffers are given back before the next are asked for")
        return self._under_way.popleft().result()

    def give_back(self, buffer: Buffer) -> None:
        """Nobody looks at a unit any more: another may be read in its place."""
        self._buffers.give_back(buffer)
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
        """Begin to read into every buffer that is free."""
        while self._left:
            unit = self._left[0]
            buffer = self._buffers.take(unit.end - unit.start)
            if buffer is None:
                return
            self._left.popleft()
            self._under_way.append(self._pool.submit(self._read, unit, buffer))

    def _read(self, unit: Unit, buffer: Buffer) -> Buffer:
        path = f"{self._folder}/{self._manifest.parts[unit.part].file}"
        view = host_bytes(buffer.content)
        problem = ""
        # A second read tells a bad transfer from bad bytes.
        for _ in range(2):
            try:
                count = self._storage.read_into(path, unit.start, view)
            except FileNotFoundError as error:
                raise CorruptCheckpointError(self._manifest.step, f"{path} is missing") from error
            problem = self._problem(unit, view[:count])
            if not problem:
                return buffer
        raise CorruptCheckpointError(self._manifest.step, f"{path}: {problem}")

    def _problem(self, unit: Unit, view: memoryview) -> str:
        """What is wrong with the bytes of a unit, "" when nothing is."""
        part = self._manifest.parts[unit.part]
        for index in range(unit.first_block, unit.first_block + unit.num_blocks):
            start, end = part.block_range(index)
            block = view[start - unit.start : end - unit.start]
            if len(block) != end - start:
                return f"bytes {start} to {end} are not all there"
            if block_checksum(part.checksum, block) != part.blocks[index]:
                return f"bytes {start} to {end} do not fit their checksum"
        return ""
