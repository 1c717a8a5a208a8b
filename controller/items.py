"""What waits in the controller's queue, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from controller.core.events import Event
from controller.store.curves import StepRow
from outlast.errors import OutlastError


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What one message brought, and who wants to know that it is durable."""

    events: tuple[Event, ...]
    rows: tuple[StepRow, ...] = ()
    durable: Callable[[], None] | None = None
    # Node, incarnation and number of the agent's message, "" for everything else.
    source: str = ""
    # Called when nothing came of the item: a client waits for it.
    failed: Callable[[OutlastError], None] | None = None

    @property
    def is_request(self) -> bool:
        """Whether a client waits for it."""
        return self.failed is not None

    def refuse(self, error: OutlastError) -> None:
        """Have the client, if one waits, know that nothing came of it."""
        if self.failed is not None:
            self.failed(error)
