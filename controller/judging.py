"""Judgements of hangs, worked out in threads while heartbeats are handled.

Who holds up a job of 100,000 ranks is a second of work. The edge asks (`take_judgements`) with
all that the answer depends on, and drops the answer when the job has moved meanwhile (`judged`).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from controller.core.edge.edge import Edge
from controller.core.edge.judgement import HangJudgement
from controller.core.events import Event
from controller.guard import Guard


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

    async def _judge(self, judgement: HangJudgement) -> None:
        try:
            event = await asyncio.to_thread(judgement.judge)
        except Exception as error:  # noqa: BLE001  # whatever it is, the job hangs all the same
            self._guard.note("watch", error)
            event = judgement.unexplained(f"internal error ({type(error).__name__}: {error})")
        found = self._guard.call("watch", None, lambda: self._edge.judged(judgement, event))
        self._post(*(found or ()))
