"""Copies of a rank's state into host memory, beside what it computes.

A GPU has engines that copy while it computes: there copies have a stream of their own,
which begins after what has been computed so far, and nothing waits for them but who
overwrites what they read. Host memory must be pinned for that, which takes a GPU's driver
some time; it goes on beside the first step. On a CPU the same is done by a thread, where
there is a core for it. Else a copy is work like any other, done when it is given.

What does not belong here: what is copied, and when it counts (`checkpoint.stage.stager`).
"""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from checkpoint.stage.hostcopy import FasterCopy, copy_by_torch


class Copied(Protocol):
    """The end of a copy."""

    def wait_before_write(self) -> None:
        """Let what is computed from now on begin only after it."""

    def wait(self) -> None:
        """Return when it has come. Raises what the copy failed with."""


class CopyStream(Protocol):
    """Copies, each done after those given before it."""

    @property
    def is_async(self) -> bool:
        """Whether copies go on after they are given."""
        ...

    def open(self, memory: Tensor) -> None:
        """Get ready to copy into parts of `memory`."""

    def begin(self) -> None:
        """Copies given from now on come after all work given so far."""

    def copy(self, sources: list[Tensor], into: list[Tensor]) -> Copied:
        """Start to copy each of `sources`; they may not change until the copy has ended."""
        ...

    def close(self) -> None:
        """Let go of the memory, into which nothing is being copied any more."""


class Done:
    """A copy that has ended."""

    def wait_before_write(self) -> None:
        """Nothing to wait for."""

    def wait(self) -> None:
        """Nothing to wait for."""


class HostCopyStream:
    """Copies are done when they are given."""

    is_async = False

    def __init__(self) -> None:
        self._copy = FasterCopy()

    def open(self, memory: Tensor) -> None:
        """Any memory will do."""

    def begin(self) -> None:
        """All work given so far is done."""

    def copy(self, sources: list[Tensor], into: list[Tensor]) -> Copied:
        self._copy(into, sources)
        return _DONE

    def close(self) -> None:
        """Nothing to let go of."""


class ThreadCopyStream:
    """A thread beside the one that computes. What it copies is there already."""

    is_async = True

    def __init__(self) -> None:
        self._given: SimpleQueue[tuple[list[Tensor], list[Tensor], _Ended] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="copy", daemon=True)
        self._thread.start()

    def open(self, memory: Tensor) -> None:
        """Any memory will do."""

    def begin(self) -> None:
        """All work given so far is done."""

    def copy(self, sources: list[Tensor], into: list[Tensor]) -> Copied:
        ended = _Ended()
        self._given.put((sources, into, ended))
        return ended

    def close(self) -> None:
        self._given.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (given := self._given.get()) is not None:
            sources, into, ended = given
            try:
                copy_by_torch(into, sources)
            except BaseException as error:  # noqa: BLE001  # whoever waits raises it
                ended.error = error
            ended.event.set()


class _Ended:
    """A copy by a thread."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.error: BaseException | None = None

    def wait_before_write(self) -> None:
        self.wait()

    def wait(self) -> None:
        self.event.wait()
        if self.error is not None:
            raise self.error


class CudaCopyStream:
    """A stream beside the one that is current."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's stubs
        self._pinner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pin")
        self._pinned: list[tuple[int, Future[bool]]] = []

    def open(self, memory: Tensor) -> None:
        self._pinned.append((memory.data_ptr(), self._pinner.submit(self._pin, memory)))

    def begin(self) -> None:
        for _, pinned in self._pinned:
            pinned.result()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    @torch.no_grad()
    def copy(self, sources: list[Tensor], into: list[Tensor]) -> Copied:
        with torch.cuda.stream(self._stream):
            if sources:
                torch._foreach_copy_(into, sources, non_blocking=True)
            # Blocking: whoever waits for it sleeps, and leaves the CPU to training.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's stubs
            event.record(self._stream)
        return _Passed(event, self._device)

    def close(self) -> None:
        self._pinner.shutdown()
        for address, pinned in self._pinned:
            if pinned.result():
                _driver().cudaHostUnregister(address)
        self._pinned.clear()

    def _pin(self, memory: Tensor) -> bool:
        torch.cuda.set_device(self._device)
        failed = _driver().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(failed):
            # Slower, since the driver copies by way of a buffer of its own, but as right.
            print(
                f"host memory of checkpoints: {memory.nbytes} bytes could not be pinned "
                f"(CUDA error {int(failed)}); saving will take longer",
                file=sys.stderr,
                flush=True,
            )
        return not int(failed)


class _Passed:
    """An event in a stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait_before_write(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


def _driver() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's stubs


_DONE = Done()


def copy_stream_for(device: torch.device, *, ranks_here: int) -> CopyStream:
    """How the state of a rank that computes on `device` is copied, one of some on its node."""
    if device.type == "cuda":
        return CudaCopyStream(device)
    has_spare_core = len(os.sched_getaffinity(0)) > ranks_here
    return ThreadCopyStream() if has_spare_core else HostCopyStream()
