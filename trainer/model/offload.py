"""What a recomputed block keeps, in host memory between its forward and its backward pass.

A GPU has engines that copy while it computes: copies out and copies back have streams of their
own, into and from pinned memory, and nothing waits for them but who uses what comes back. On a CPU
the same copies are work like any other.

Source: ZeRO-R (arXiv 1910.02054), 6.1, which calls it P_a+cpu.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class _Streams(NamedTuple):
    """Of one GPU."""

    out: torch.cuda.Stream
    back: torch.cuda.Stream


@cache
def _streams(device: torch.device) -> _Streams:
    out, back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
    return _Streams(out, back)


class InHostMemory:
    """A tensor that is in host memory until it is taken back to its device."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin to copy it; its memory on the device is free once that has ended."""
        self._device = tensor.device
        self._back: Tensor | None = None
        self._has_come: torch.cuda.Event | None = None
        # As it lies: a sum in another order of strides may have other bits.
        self._host = torch.empty_like(
            tensor.detach(), device="cpu", pin_memory=tensor.device.type == "cuda"
        )
        if tensor.device.type != "cuda":
            self._host.copy_(tensor.detach())
            return
        stream = _streams(tensor.device).out
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._has_gone = stream.record_event()
        tensor.record_stream(stream)

    def bring_back(self) -> None:
        """Begin to copy it back, if that has not begun."""
        if self._back is not None:
            return
        if self._device.type != "cuda":
            self._back = self._host
            return
        stream = _streams(self._device).back
        stream.wait_event(self._has_gone)
        with torch.cuda.stream(stream):
            self._back = torch.empty_like(self._host, device=self._device)
            self._back.copy_(self._host, non_blocking=True)
            self._has_come = stream.record_event()

    def take(self) -> Tensor:
        """The tensor on its device, for what is computed from now on. Only once."""
        self.bring_back()
        found, self._back = self._back, None
        assert found is not None
        if self._has_come is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._has_come)
            found.record_stream(current)
        # Its pages may be another tensor's as soon as copies that read them have ended.
        del self._host
        return found
