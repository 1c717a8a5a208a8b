"""What a recomputed block keeps, in host memory between its forward and its backward pass.

A GPU has engines that copy while it computes: copies out and copies back have streams of their
own, into and from pinned memory. On a CPU the same copies are work like any other.

Source: ZeRO-R (arXiv 1910.02054), 6.1, which calls it P_a+cpu.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Copies out that may be under way while computing goes on: what they read has memory until then.
_MOST_LEAVING = 1


class _Leaving(NamedTuple):
    """What is being copied out, and the end of that."""

    tensor: Tensor
    has_gone: torch.cuda.Event


class _Copier:
    """Copies of one GPU, each way one after the other.

    Memory belongs to the stream that computes, which waits for a copy before it drops what the copy
    reads or writes. Were it the allocator that waits (`record_stream`), a CPU that runs ahead would
    have most of what is kept on the device at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        out, back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._out, self._back = out, back
        self._leaving: deque[_Leaving] = deque()

    def out(self, tensor: Tensor, host: Tensor) -> torch.cuda.Event:
        """Begin to copy into pinned memory; the end of that."""
        current = torch.cuda.current_stream(self._device)
        self._out.wait_stream(current)
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            has_gone: torch.cuda.Event = self._out.record_event()
        self._leaving.append(_Leaving(tensor, has_gone))
        while len(self._leaving) > _MOST_LEAVING:
            current.wait_event(self._leaving.popleft().has_gone)
        return has_gone

    def back(self, host: Tensor, has_gone: torch.cuda.Event) -> tuple[Tensor, torch.cuda.Event]:
        """Begin to copy to the device, behind what is computed so far; and the end of that."""
        found = torch.empty_like(host, device=self._device)
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        self._back.wait_event(has_gone)
        with torch.cuda.stream(self._back):
            found.copy_(host, non_blocking=True)
            return found, self._back.record_event()


@cache
def _copier(device: torch.device) -> _Copier:
    return _Copier(device)


class InHostMemory:
    """A tensor that is in host memory until it is taken back to its device."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin to copy it; its memory on the device is free soon after that has ended."""
        self._device = tensor.device
        self._back: Tensor | None = None
        self._has_come: torch.cuda.Event | None = None
        kept = tensor.detach()
        is_cuda = tensor.device.type == "cuda"
        # As it lies: a sum in another order of strides may have other bits.
        self._host = torch.empty_like(kept, device="cpu", pin_memory=is_cuda)
        if is_cuda:
            self._has_gone = _copier(tensor.device).out(kept, self._host)
        else:
            self._host.copy_(kept)

    def bring_back(self) -> None:
        """Begin to copy it back, if that has not begun."""
        if self._back is not None:
            return
        if self._device.type != "cuda":
            self._back = self._host
            return
        self._back, self._has_come = _copier(self._device).back(self._host, self._has_gone)

    def take(self) -> Tensor:
        """The tensor on its device, for what is computed from now on. Only once."""
        self.bring_back()
        found = self._back
        assert found is not None
        self._wait()
        # Its pages may be another tensor's as soon as copies that read them have ended.
        del self._host
        self._back = None
        return found

    def _wait(self) -> None:
        """Let what is computed from now on begin behind the copy back, if there is one."""
        if self._has_come is not None:
            torch.cuda.current_stream(self._device).wait_event(self._has_come)
            self._has_come = None

    def __del__(self) -> None:
        # Of a pass that was given up: the memory that is written to passes on to others.
        self._wait()
