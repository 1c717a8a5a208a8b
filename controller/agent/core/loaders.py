"""Whether the process that reads data for all ranks of an attempt on this node is started again.

Ranks read by themselves where it does not answer, so nothing of this ends an attempt: one that has
ended is started again at once, then later and later, and no more when that has not helped.

What does not belong here: what it reads, and how ranks ask it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controller.agent.core.actions import (
    Action,
    ReportDataLoader,
    StartDataLoader,
    StopDataLoader,
)
from controller.agent.core.inputs import DataLoaderEnded, DataLoaderStarted
from controller.agent.core.reports import AttemptKey

# Before each new start in a row. What ends it five times is the node or the data, and a rank that
# reads by itself does not lose much.
RESTART_DELAYS_S = (0.0, 1.0, 2.0, 4.0)
# One that has lived so long after a new start is well again.
SETTLED_S = 60.0


@dataclass(slots=True, kw_only=True)
class _Loader:
    num_ends: int = 0
    # When it is to be started again, and when it will be well; infinite for never.
    restart_s: float = math.inf
    settled_s: float = math.inf


class DataLoaderTable:
    """The loaders of attempts that run here, dead ones included."""

    def __init__(self) -> None:
        self._loaders: dict[AttemptKey, _Loader] = {}

    def begin(self, key: AttemptKey) -> list[Action]:
        """The ranks of an attempt have been forked, and share what is read."""
        self._loaders[key] = _Loader()
        return [StartDataLoader(key=key)]

    def over(self, key: AttemptKey) -> list[Action]:
        """No rank of an attempt is left here."""
        return [] if self._loaders.pop(key, None) is None else [StopDataLoader(key=key)]

    def handle(self, given: DataLoaderStarted | DataLoaderEnded, now_s: float) -> list[Action]:
        """Take in what became of one; of one that is not wanted any more it is no news."""
        loader = self._loaders.get(given.key)
        if loader is None:
            return []
        if isinstance(given, DataLoaderEnded):
            return self._ended(given, loader, now_s)
        if loader.num_ends:
            loader.settled_s = now_s + SETTLED_S
        return []

    def let_time_pass(self, now_s: float) -> list[Action]:
        """Start again those whose time has come."""
        actions: list[Action] = []
        for key, loader in self._loaders.items():
            if loader.restart_s <= now_s:
                loader.restart_s = math.inf
                actions.append(StartDataLoader(key=key))
            if loader.settled_s <= now_s:
                loader.settled_s, loader.num_ends = math.inf, 0
                actions.append(ReportDataLoader(key=key, problem=""))
        return actions

    def wake_at(self) -> float:
        """When that is; infinite for never."""
        times = (min(loader.restart_s, loader.settled_s) for loader in self._loaders.values())
        return min(times, default=math.inf)

    def _ended(self, ended: DataLoaderEnded, loader: _Loader, now_s: float) -> list[Action]:
        loader.settled_s = math.inf
        loader.num_ends += 1
        if loader.num_ends <= len(RESTART_DELAYS_S):
            loader.restart_s = now_s + RESTART_DELAYS_S[loader.num_ends - 1]
            return [ReportDataLoader(key=ended.key, problem=f"{ended.reason}; it is started again")]
        problem = (
            f"{ended.reason}; it has ended {loader.num_ends} times in a row and is not started "
            "again: each rank reads by itself"
        )
        # So that no rank waits for it.
        stopped = self.over(ended.key)
        return [ReportDataLoader(key=ended.key, problem=problem), *stopped]
