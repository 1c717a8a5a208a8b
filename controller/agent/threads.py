"""Blocking calls away from the event loop, in threads that nobody has to wait for.

asyncio's own threads are joined when the loop ends: one call into a storage that
hangs would keep the agent from ending. These are daemons.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")


async def run_blocking(call: Callable[[], Answer], name: str) -> Answer:
    """What `call` returns or raises. Cancelling stops the wait, not the call."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def settle(value: Answer | None, error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]  # None only beside an error

    def work() -> None:
        value, error = None, None
        try:
            value = call()
        # Whatever it is, it belongs to whoever waits.
        except Exception as raised:  # noqa: BLE001
            error = raised
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            # The loop has ended; nobody waits any more.
            return

    threading.Thread(target=work, name=name, daemon=True).start()
    return await answer
