"""Gives a machine one input after the other, and has its actions done in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from controller.agent.core.actions import Action
from controller.agent.core.inputs import Input


class Driver:
    """What an action brings about at once waits until all actions before it are done."""

    def __init__(
        self,
        handle: Callable[[Input, float], list[Action]],
        perform: Callable[[Action], None],
        clock: Callable[[], float],
    ) -> None:
        self._handle = handle
        self._perform = perform
        self._clock = clock
        self._given: deque[Input] = deque()
        self.is_handling = False

    def give(self, given: Input) -> None:
        """Have the machine take this in, after what it is being given just now."""
        self._given.append(given)
        if self.is_handling:
            return
        self.is_handling = True
        try:
            while self._given:
                for action in self._handle(self._given.popleft(), self._clock()):
                    self._perform(action)
        finally:
            self.is_handling = False
