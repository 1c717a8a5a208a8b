"""Blocking calls away from the event loop, in threads that nobody has to wait for.

asyncio's own threads are joined when the loop ends: one call into a storage that
hangs would keep the agent from ending. These are daemons.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from outlast.errors import RetryableError

# Of one name. What hangs in the kernel cannot be ended, so it must not be tried for ever.
MAX_HUNG_CALLS = 16

Answer = TypeVar("Answer")

# Only the loop's thread changes it.
_hung = Counter[str]()


class HungCallsError(RetryableError):
    """Too many calls of a kind were given up and have not come back."""


async def run_blocking(call: Callable[[], Answer], name: str) -> Answer:
    """What `call` returns or raises. Cancelling stops the wait, not the call.

    Raises:
        HungCallsError: so many earlier calls of this name hang that no more are made.
    """
    if _hung[name] >= MAX_HUNG_CALLS:
        raise HungCallsError(
            f"{name}: {MAX_HUNG_CALLS} earlier calls have not come back; the disk or store "
            "behind them does not answer"
        )
    is_left = False
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Answer] = loop.create_future()

    def settle(value: Answer | None, error: BaseException | None) -> None:
        if is_left:
            _hung[name] -= 1
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
    try:
        return await answer
    except asyncio.CancelledError:
        is_left = True
        _hung[name] += 1
        raise
