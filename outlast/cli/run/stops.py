"""Signals that ask a command to end: the first in order, the second at once."""

from __future__ import annotations

import signal
from types import FrameType

from outlast.startup import stop_signals

# As shells report the end by a signal.
_SHELL_BASE = 128


class Stops:
    """How often a person has asked for the end."""

    def __init__(self) -> None:
        self._first: signal.Signals | None = None
        self.count = 0

    def install(self) -> None:
        """Count signals from here on, which end nothing by themselves."""
        for number in (*stop_signals(), signal.SIGQUIT):
            signal.signal(number, self._on_signal)

    @property
    def is_asked(self) -> bool:
        return self.count > 0

    @property
    def is_by_hand(self) -> bool:
        """Whether a person at a terminal, or another program, asked for the end."""
        return self._first in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)

    @property
    def code(self) -> int:
        """The exit code of a command that such a signal has ended."""
        return exit_code(-int(self._first or signal.SIGINT))

    def ask(self, number: signal.Signals) -> None:
        """As if this signal had come."""
        self._first = self._first or number
        self.count += 1

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask(signal.Signals(number))


def exit_code(code: int) -> int:
    """What a shell reports of a process that ended like this; signals are negative."""
    return _SHELL_BASE - code if code < 0 else code
