"""Waiting for a peer, by the time in which we listened to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

# A loop that was busy for long takes one of them only.
_SLICES = 8

_Value = TypeVar("_Value")


async def within(limit_s: float, wanted: Awaitable[_Value]) -> _Value:
    """What is awaited, or TimeoutError after so long in which the loop was free to read it.

    What came in time must not be late because we were busy.
    """
    task = asyncio.ensure_future(wanted)
    try:
        for _ in range(_SLICES):
            done, _ = await asyncio.wait([task], timeout=limit_s / _SLICES)
            if done:
                return task.result()
    finally:
        task.cancel()
    raise TimeoutError
