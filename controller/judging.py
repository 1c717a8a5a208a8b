"""Judgements of hangs, worked out in threads while heartbeats are handled.

Who holds up a job of 100,000 ranks is a second of work. The edge asks (`take_judgements`) with
all that the answer depends on, and drops the answer when the job has moved meanwhile (`judged`).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from controller.core.edge.edge import Edge
from controller.core.edge.judgement import HangJudgement
from controller.core.events import Event
from controller.guard import Guard

# Later than this nobody waits to know who it is: the job hangs all the same. Of 100,000 ranks it
# takes 2 s on an idle machine.
_WITHIN_S = 10.0
_WITHIN_S_PER_RANK = 200e-6


class Post(Protocol):
    """Queues events that nobody waits for."""

    def __call__(self, *events: Event) -> None: ...


class Judging:
    """What is being worked out."""

    def __init__(self, edge: Edge, guard: Guard, post: Post) -> None:
        self._edge = edge
        self._guard = guard
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()
        # Apart from the threads of requests, all of which may be waiting for storage.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="judge")

    def begin(self) -> None:
        """Begin what the edge asks for."""
        for judgement in self._edge.take_judgements():
            task = asyncio.create_task(self._judge(judgement), name=f"judge-{judgement.job_id}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Nobody waits for an answer any more."""
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _judge(self, judgement: HangJudgement) -> None:
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(_WITHIN_S + _WITHIN_S_PER_RANK * judgement.world_size):
                event = await loop.run_in_executor(self._threads, judgement.judge)
        except Exception as error:  # noqa: BLE001  # whatever it is, the job hangs all the same
            self._guard.note("watch", error)
            event = judgement.unexplained(f"internal error ({type(error).__name__}: {error})")
        # After a mistake of ours, too: the machine knows for itself which attempt it is in.
        as_found: list[Event] = [event]
        found = self._guard.call("watch", as_found, lambda: self._edge.judged(judgement, event))
        self._post(*(found or ()))
