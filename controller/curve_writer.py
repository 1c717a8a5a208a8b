"""Step reports and states of jobs on their way to the database: they wait for each other, and cost
an fsync for each of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from controller.core.changes import StateChange
from controller.items import Item
from controller.store.curves import Curves
from controller.store.history import History

# Step reports wait for each other for so long.
CURVES_PERIOD_S = 0.1


class CurveWriter:
    """Writes the rows of many turns at once, and then says that they are durable."""

    def __init__(self, curves: Curves, history: History) -> None:
        self._curves = curves
        self._history = history
        self._not_written: list[Callable[[], None]] = []
        self.due_s: float | None = None
        """When rows have waited for long enough, by the monotonic clock; None without any."""

    def is_due(self, now_s: float) -> bool:
        """Whether rows have waited for long enough."""
        return self.due_s is not None and now_s >= self.due_s

    def take(self, items: Sequence[Item], changes: Sequence[StateChange], now_s: float) -> None:
        """Take the rows of a turn, and what it changed."""
        self._history.take(changes)
        if self._history.has_unwritten:
            self.due_s = self.due_s or now_s + CURVES_PERIOD_S
        for item in items:
            if item.rows:
                self._curves.take(item.rows)
                self.due_s = self.due_s or now_s + CURVES_PERIOD_S

    def tell_durable(self, items: Sequence[Item]) -> None:
        """Tell whoever offered these items, as soon as their rows are written, too."""
        for item in items:
            if item.durable is None:
                continue
            if item.rows and self._curves.num_unwritten:
                self._not_written.append(item.durable)
            else:
                item.durable()

    def flush(self) -> None:
        """Write what waits.

        Raises:
            DiskFullError: nothing was written; it goes on waiting.
        """
        self._curves.flush()
        self._history.flush()
        self.due_s = None
        waiting, self._not_written = self._not_written, []
        for durable in waiting:
            durable()
