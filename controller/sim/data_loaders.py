"""The processes of a simulated node that read data for the ranks of its attempts.

Which of them runs, the production machine decides. What it says is held against the workers: a
loader is started for an attempt that runs here, and none of the job is left by then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from controller.agent.core.actions import ReportDataLoader, StartDataLoader, StopDataLoader
from controller.agent.core.buffer import Weight
from controller.agent.core.inputs import DataLoaderEnded, DataLoaderStarted
from controller.agent.core.reports import AttemptKey
from controller.agent.wire import data_loader_sign
from controller.sim.promises import Promises

if TYPE_CHECKING:
    from controller.sim.agent import Agent

# A fork, and files that are opened.
START_S = 0.05


class DataLoaders:
    """Those of one agent."""

    def __init__(
        self,
        agent: Agent,
        promises: Promises,
        give: Callable[[DataLoaderStarted | DataLoaderEnded], None],
    ) -> None:
        self._agent, self._fail, self._give = agent, promises.fail, give
        # By attempt, whether its loader is up.
        self._running: dict[AttemptKey, bool] = {}

    def perform(self, action: StartDataLoader | StopDataLoader | ReportDataLoader) -> None:
        """Do what the machine wants."""
        match action:
            case StartDataLoader(key=key):
                self._start(key)
            case StopDataLoader(key=key):
                self._running.pop(key, None)
            case ReportDataLoader(key=key, problem=problem):
                sign = data_loader_sign(*key, problem, at_s=0.0)
                self._agent.emit(sign, Weight.LASTING)
            case _:
                assert_never(action)

    def kill(self) -> None:
        """Those that run end, each for itself."""
        for key in [key for key, is_up in self._running.items() if is_up]:
            del self._running[key]
            self._give(DataLoaderEnded(key=key, reason="killed by SIGKILL"))

    def _start(self, key: AttemptKey) -> None:
        if others := [other for other in self._running if other.job_id == key.job_id]:
            self._fail(f"{key} has a data loader, and so has {others[0]}")
        if not any((one.job_id, one.attempt) == key for one in self._agent.running()):
            self._fail(f"{key} has a data loader, and no ranks")
        self._running[key] = False
        self._agent.world.timeline.after(START_S, self._started, key)

    def _started(self, key: AttemptKey) -> None:
        if self._agent.is_alive and self._running.get(key) is False:
            self._running[key] = True
            self._give(DataLoaderStarted(key=key))
