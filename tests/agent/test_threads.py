"""Blocking calls that must not hold up the end of the agent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from checkpoint.storage.hung import MAX_HUNG_CALLS
from controller.agent.threads import HungCallsError, run_blocking


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


def test_calls_that_hang_are_not_made_for_ever() -> None:
    never = threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await run_blocking(never.wait, "hangs for ever")

    async def run() -> None:
        for _ in range(MAX_HUNG_CALLS):
            await give_up()
        num_threads = threading.active_count()
        with pytest.raises(HungCallsError, match="16 earlier calls have not come back"):
            await run_blocking(never.wait, "hangs for ever")
        assert threading.active_count() == num_threads
        # Others are made, and these again once they have come back.
        assert await run_blocking(lambda: 1, "another") == 1
        never.set()
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await run_blocking(lambda: 2, "hangs for ever") == 2
                    return
                except HungCallsError:
                    await asyncio.sleep(0)

    asyncio.run(run())


def test_call_that_is_given_up_as_its_answer_arrives_does_not_count_as_hung() -> None:
    async def give_up_in_the_turn_of_the_answer() -> None:
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[int]] = []

        def call() -> int:
            # The loop handles the answer between these two.
            loop.call_soon_threadsafe(lambda: loop.call_soon(tasks[0].cancel))
            return 1

        tasks.append(asyncio.create_task(run_blocking(call, "given up late")))
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]

    async def run() -> None:
        for _ in range(2 * MAX_HUNG_CALLS):
            await give_up_in_the_turn_of_the_answer()
        assert await run_blocking(lambda: 2, "given up late") == 2

    asyncio.run(run())
