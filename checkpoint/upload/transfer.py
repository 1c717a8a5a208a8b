"""Sends one file to storage: parts side by side, paced, each tried again when it fails.

A part that fails alone costs itself, not the file. What cannot be repaired part by part
(a store that takes a file in order only, an upload that the server has forgotten) fails
as a whole, and the caller begins anew.

What does not belong here: what is in the file, and when to send it (`uploader.py`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from checkpoint.core.pacing import Pace, TransferLimits, backoff_s
from checkpoint.errors import StorageTimeoutError, StorageUnavailableError
from checkpoint.storage.storage import BoundedWriter, Storage
from outlast.crashpoints import CrashPoint, reach

logger = logging.getLogger(__name__)

# With back-off this spans about 8 to 16 s: a server that restarts, a load balancer that moves.
_PART_TRIES = 6

# Hears of every part before it goes: where it begins in the file, and its bytes. Called
# from several threads.
OnPart = Callable[[int, memoryview], None]


class StoppedError(Exception):
    """Whoever asked for the transfer wants it no more."""


@dataclass(slots=True, kw_only=True)
class _File:
    """One file on its way."""

    writer: BoundedWriter
    payload: memoryview
    part_bytes: int
    on_part: OnPart
    deadline_s: float
    sent_bytes: int = 0
    failed: threading.Event = field(default_factory=threading.Event)


class Transfer:
    """Sends files to one storage within `limits`.

    `pause(seconds)` waits that long, and says at once whether to stop; `jitter()` is
    chance in 0..1.
    """

    def __init__(
        self,
        storage: Storage,
        limits: TransferLimits,
        *,
        pause: Callable[[float], bool],
        jitter: Callable[[], float],
    ) -> None:
        self._storage = storage
        self._limits = limits
        self._pause = pause
        self._jitter = jitter
        self._pace = Pace(limits.bytes_per_s)
        self._lock = threading.Lock()

    def send(
        self, path: str, payload: memoryview | bytes, on_part: OnPart, *, deadline_s: float
    ) -> None:
        """Write `payload` to `path` by `deadline_s` of the monotonic clock.

        Raises:
            StoppedError: it was stopped.
            StorageUnavailableError: storage does not take it, or not in time.
        """
        part_bytes = self._limits.part_bytes(len(payload))
        file = _File(
            writer=self._storage.writer(path, len(payload), part_bytes),
            payload=memoryview(payload),
            part_bytes=part_bytes,
            on_part=on_part,
            deadline_s=deadline_s,
        )
        reach(CrashPoint.FILE_BEGUN)
        try:
            self._send_parts(file)
            reach(CrashPoint.PARTS_SENT)
            file.writer.finish()
        except (StorageUnavailableError, StoppedError):
            file.writer.abort()
            raise

    def _send_parts(self, file: _File) -> None:
        num_parts = -(-len(file.payload) // file.part_bytes)
        num_threads = self._limits.num_parallel(len(file.payload))
        if num_threads == 1 or not file.writer.takes_any_order:
            for index in range(num_parts):
                self._send_part(file, index)
            return
        # Threads inherit the low priority of this one. They end soon after a failure or a
        # stop, as every call to storage has its deadline.
        with ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint-part") as pool:
            sending = [pool.submit(self._send_part, file, index) for index in range(num_parts)]
            try:
                for part in sending:
                    part.result()
            except BaseException:
                file.failed.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _send_part(self, file: _File, index: int) -> None:
        start = index * file.part_bytes
        chunk = file.payload[start : start + file.part_bytes]
        file.on_part(start, chunk)
        wait_s = self._turn_s(len(chunk))
        trouble: StorageUnavailableError | None = None
        try:
            for num_failures in range(1, _PART_TRIES + 1):
                self._wait(file, wait_s, trouble)
                try:
                    file.writer.write(index, chunk)
                    break
                except StorageTimeoutError:
                    # The call still has the file, and may yet write to it.
                    raise
                except StorageUnavailableError as error:
                    # Something like "no such upload": the store has forgotten what went before.
                    is_forgotten = isinstance(error.__cause__, FileNotFoundError)
                    is_final = num_failures == _PART_TRIES or not file.writer.takes_any_order
                    if is_final or is_forgotten or error.lasting:
                        raise
                    trouble = error
                    wait_s = backoff_s(num_failures, self._jitter())
                    logger.info("part tried again in %.1f s: %s", wait_s, error)
        finally:
            # It knows this frame: until the next collection of garbage both would stay, and the
            # slot mapped, though its job is gone.
            trouble = None
        reach(CrashPoint.PART_SENT)
        with self._lock:
            file.sent_bytes += len(chunk)

    def _turn_s(self, nbytes: int) -> float:
        with self._lock:
            return self._pace.delay_s(nbytes, time.monotonic())

    def _wait(self, file: _File, wait_s: float, trouble: StorageUnavailableError | None) -> None:
        """Wait, unless there is no reason to go on then."""
        left_s = file.deadline_s - time.monotonic()
        if left_s <= 0 or wait_s > left_s:
            raise StorageUnavailableError(
                f"checkpoint storage {self._storage.url}: only {file.sent_bytes} of "
                f"{len(file.payload)} bytes of {file.writer.path} were sent in time "
                f"({trouble or 'it is slow'}); raise checkpoint.upload_timeout_s, or find a "
                "faster store",
                lasting=True,
            ) from trouble
        if self._pause(wait_s) or file.failed.is_set():
            raise StoppedError
