"""Blocking calls away from the event loop, in threads that nobody has to wait for.

asyncio's own threads are joined when the loop ends: one call into a storage that
hangs would keep the agent from ending. These are daemons.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from checkpoint.storage.hung import MAX_HUNG_CALLS, CallWatch, num_hung
from outlast.errors import RetryableError

Answer = TypeVar("Answer")


# A limit of processes (`ulimit -u`, the cgroup's) may be reached for a moment.
_START_TRIES = 10
_START_PAUSE_S = 0.2


class NoThreadError(RetryableError):
    """The kernel gives this process no more threads."""


class HungCallsError(RetryableError):
    """Too many calls of a kind were given up and have not come back."""


async def run_blocking(call: Callable[[], Answer], name: str) -> Answer:
    """What `call` returns or raises. Cancelling stops the wait, not the call.

    Raises:
        HungCallsError: so many earlier calls of this name hang that no more are made.
        NoThreadError: there was no thread for it for seconds.
    """
    # No store has a name like it, whose calls are counted beside these.
    kind = f"agent: {name}"
    if num_hung(kind) >= MAX_HUNG_CALLS:
        raise HungCallsError(
            f"{name}: {MAX_HUNG_CALLS} earlier calls have not come back; the disk or store "
            "behind them does not answer"
        )
    watch = CallWatch(kind)
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
        # Not in the loop: a task that is cancelled as the answer arrives leaves nothing behind.
        watch.come_back()
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            # The loop has ended; nobody waits any more.
            return

    await _start(work, name)
    try:
        return await answer
    except asyncio.CancelledError:
        watch.leave()
        raise


async def _start(work: Callable[[], None], name: str) -> None:
    for num_tries in range(1, _START_TRIES + 1):
        try:
            threading.Thread(target=work, name=name, daemon=True).start()
        except RuntimeError as error:
            if num_tries == _START_TRIES:
                raise NoThreadError(
                    f"{name}: {error}; this node's limit of processes is reached "
                    "(`ulimit -u`, pids.max of the cgroup)"
                ) from error
            await asyncio.sleep(_START_PAUSE_S)
        else:
            return
