"""Follows the controller's records and tells each receiver what it wants to know.

What was told is kept in a file, so that a controller that comes back tells what happened at its
end, and nothing twice; a message whose delivery was not confirmed may come again, with the same
id. A receiver that is away is tried again for a day, and holds up no other.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from controller import state_dir
from controller.core.notices import Notice, notices
from controller.core.telling import HORIZON_S, Message, due
from controller.notify import senders
from controller.notify.settings import Notify, Receiver
from controller.service import Service
from outlast.errors import OutlastError

logger = logging.getLogger(__name__)

LOOK_PERIOD_S = 1.0
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0
FILE_NAME = "notifications.json"

Send = Callable[[Receiver, Message, str], None]


class Told:
    """What one receiver has been told, and since when it is told anything."""

    def __init__(self, since_s: float, told: dict[str, float] | None = None) -> None:
        self.since_s = since_s
        self.told = told or {}

    def add(self, message: Message, now_s: float) -> None:
        self.told |= dict.fromkeys(message.keys, now_s)

    def forget_before(self, since_s: float) -> None:
        """What is too old to be told needs not be remembered."""
        self.since_s = max(self.since_s, since_s)
        self.told = {key: at_s for key, at_s in self.told.items() if at_s >= self.since_s}


class Line:
    """The way to one receiver."""

    def __init__(self, name: str, receiver: Receiver, told: Told) -> None:
        self.name = name
        self.receiver = receiver
        self.told = told
        self.counts: Counter[str] = Counter({"sent": 0, "failed": 0})
        self._failures = 0
        self._next_s = 0.0
        self._last_error = ""
        self.task: asyncio.Task[None] | None = None

    def due(self, found: Sequence[Notice], now_s: float) -> tuple[Message, ...]:
        """What it is to be told now, unless it is being told something or did not answer."""
        is_busy = self.task is not None and not self.task.done()
        if is_busy or now_s < self._next_s:
            return ()
        self.told.forget_before(now_s - HORIZON_S)
        wanted = (each for each in found if each.at_s >= self.told.since_s)
        return due(wanted, self.told.told, self.receiver.wishes, now_s)

    def delivered(self, message: Message, now_s: float) -> None:
        self.counts["sent"] += 1
        self.told.add(message, now_s)
        self._failures, self._last_error = 0, ""

    def failed(self, error: OutlastError, now_s: float) -> None:
        """Say it once, and wait longer each time."""
        self.counts["failed"] += 1
        wait_s = min(FIRST_RETRY_S * 2**self._failures, LAST_RETRY_S)
        self._failures += 1
        self._next_s = now_s + wait_s
        if str(error) != self._last_error:
            logger.warning(
                "a notification was not delivered, and is tried again for a day: receiver=%s %s",
                self.name,
                error,
            )
        self._last_error = str(error)


class Notifier:
    """Tells all receivers of one controller."""

    def __init__(
        self, service: Service, settings: Notify, folder: Path, *, send: Send = senders.send
    ) -> None:
        self._service = service
        self._page = settings.page
        self._file = folder / FILE_NAME
        self._send = send
        told = self._read(service.now_s)
        self._lines = [
            Line(name, receiver, told.get(name) or Told(service.now_s))
            for name, receiver in settings.receivers.items()
        ]

    def counts(self) -> dict[tuple[str, str], int]:
        """Messages by receiver and outcome (sent, failed), since this controller began."""
        return {
            (line.name, outcome): number
            for line in self._lines
            for outcome, number in line.counts.items()
        }

    async def run(self) -> None:
        """Look for as long as the controller lives."""
        self._write()
        try:
            while self._lines:
                try:
                    self._look()
                except Exception as error:  # noqa: BLE001  # a mistake of ours must not be the last look
                    self._service.guard.note("notifications", error)
                await asyncio.sleep(LOOK_PERIOD_S)
        finally:
            for line in self._lines:
                if line.task is not None:
                    line.task.cancel()

    def _look(self) -> None:
        now_s = self._service.now_s
        since_s = min(line.told.since_s for line in self._lines)
        found = list(notices(self._service.state, since_s))
        for line in self._lines:
            if messages := line.due(found, now_s):
                line.task = asyncio.create_task(self._tell(line, messages), name=line.name)

    async def _tell(self, line: Line, messages: Sequence[Message]) -> None:
        for message in messages:
            try:
                await asyncio.to_thread(self._send, line.receiver, message, self._page)
            except senders.PartlyDeliveredError as error:
                logger.warning("a notification: receiver=%s %s", line.name, error)
            except senders.DeliveryError as error:
                line.failed(error, self._service.now_s)
                return
            except Exception as error:  # noqa: BLE001  # not to be tried each second
                self._service.guard.note("notifications", error)
                line.failed(senders.DeliveryError(repr(error)), self._service.now_s)
                return
            line.delivered(message, self._service.now_s)
            self._write()

    def _read(self, now_s: float) -> dict[str, Told]:
        try:
            document = json.loads(self._file.read_text())
            return {
                str(name): Told(
                    # Not after a clock that has stepped back since.
                    min(float(each["since_s"]), now_s),
                    {str(key): float(at_s) for key, at_s in each["told"].items()},
                )
                for name, each in document.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning(
                "%s cannot be read (%s): nothing that happened before now is told",
                self._file,
                error,
            )
            return {}

    def _write(self) -> None:
        document = {
            line.name: {"since_s": line.told.since_s, "told": line.told.told}
            for line in self._lines
        }
        try:
            state_dir.write_whole(self._file, document)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): after a restart something may be told twice",
                self._file,
                error,
            )
