"""Copies that end when a test lets them, in order and beside the caller, as a GPU's do."""

from __future__ import annotations

import queue
import threading

from torch import Tensor


class Copy:
    """The end of a copy; on a CPU, to hold means to wait."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self.was_held = False

    def wait_before_write(self) -> None:
        self.was_held = True
        self.wait()

    def wait(self) -> None:
        if not self._ended.wait(30.0):
            raise TimeoutError("a copy did not end")

    def end(self) -> None:
        self._ended.set()


class GatedCopyStream:
    """Copies when it is let to: each takes a permit, or `after_s` when there is no end of them."""

    is_async = True

    def __init__(self, *, permits: int | None = None, after_s: float = 0.0) -> None:
        self.copies: list[Copy] = []
        self.breaks = False
        self._permits = None if permits is None else threading.Semaphore(permits)
        self._after_s = after_s
        self._work: queue.SimpleQueue[tuple[list[Tensor], list[Tensor], Copy] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def open(self, memory: Tensor) -> None:
        assert memory.is_contiguous()

    def begin(self) -> None:
        self.copies = []

    def copy(self, sources: list[Tensor], into: list[Tensor]) -> Copy:
        if self.breaks:
            raise RuntimeError("the device is gone")
        copied = Copy()
        self.copies.append(copied)
        self._work.put((sources, into, copied))
        return copied

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(30.0)

    def let(self, copies: int) -> None:
        """Let so many more copies end."""
        assert self._permits is not None
        self._permits.release(copies)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            sources, into, copied = work
            if self._permits is not None:
                self._permits.acquire()
            # Late on purpose: what changes a source without asking is caught.
            copied._ended.wait(self._after_s)
            for source, target in zip(sources, into, strict=True):
                target.copy_(source)
            copied.end()
