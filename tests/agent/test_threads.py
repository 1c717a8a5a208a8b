"""Blocking calls that must not hold up the end of the agent."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from controller.agent.threads import run_blocking


def test_blocking_call_returns_or_raises_where_it_is_awaited() -> None:
    assert asyncio.run(run_blocking(threading.current_thread, "named")).name == "named"
    with pytest.raises(ZeroDivisionError):
        asyncio.run(run_blocking(lambda: 1 // 0, "divides"))


def test_call_that_hangs_does_not_hold_up_the_end_of_the_loop() -> None:
    never = threading.Event()

    async def give_up() -> None:
        async with asyncio.timeout(0.01):
            await run_blocking(never.wait, "hangs")

    started_s = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert time.monotonic() - started_s < 5.0
    never.set()
