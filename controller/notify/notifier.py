"""Sends due messages to every receiver, each in its own thread.

What was sent is kept in a file: a restarted controller sends what happened while it was away, and
nothing twice. A message whose delivery was not confirmed may be sent again, with the same id. A
receiver that does not answer is retried for a day, and delays no other.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from controller import state_dir
from controller.core.notifications.grouping import MAX_AGE_S, Message, due
from controller.core.notifications.job_events import JobEvent, job_events
from controller.notify import senders
from controller.notify.settings import Notify, Receiver
from controller.service import Service
from outlast.errors import OutlastError

logger = logging.getLogger(__name__)

POLL_PERIOD_S = 1.0
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0
FILE_NAME = "notifications.json"

Send = Callable[[Receiver, Message, str], None]


class SentLog:
    """What was sent to one receiver, and since when events count for it."""

    def __init__(self, since_s: float, sent: dict[str, float] | None = None) -> None:
        self.since_s = since_s
        self.sent = sent or {}

    def add(self, message: Message, now_s: float) -> None:
        self.sent |= dict.fromkeys(message.keys, now_s)

    def drop_before(self, since_s: float) -> None:
        """Forget what is too old to be sent again."""
        self.since_s = max(self.since_s, since_s)
        self.sent = {key: at_s for key, at_s in self.sent.items() if at_s >= self.since_s}


class Channel:
    """Delivery to one receiver."""

    def __init__(self, name: str, receiver: Receiver, log: SentLog) -> None:
        self.name = name
        self.receiver = receiver
        self.log = log
        self.counts: Counter[str] = Counter({"sent": 0, "failed": 0})
        self.task: asyncio.Task[None] | None = None
        self._failures = 0
        self._retry_at_s = 0.0
        self._last_error = ""

    def due(self, events: Sequence[JobEvent], now_s: float) -> tuple[Message, ...]:
        """Messages to send now; none while it is busy, or waits before a retry."""
        is_busy = self.task is not None and not self.task.done()
        if is_busy or now_s < self._retry_at_s:
            return ()
        self.log.drop_before(now_s - MAX_AGE_S)
        recent = (event for event in events if event.at_s >= self.log.since_s)
        return due(recent, self.log.sent, self.receiver.route, now_s)

    def delivered(self, message: Message, now_s: float) -> None:
        self.counts["sent"] += 1
        self.log.add(message, now_s)
        self._failures, self._last_error = 0, ""

    def failed(self, error: OutlastError, now_s: float) -> None:
        """Log the error unless it is the last one again, and back off."""
        self.counts["failed"] += 1
        self._retry_at_s = now_s + min(FIRST_RETRY_S * 2**self._failures, LAST_RETRY_S)
        self._failures += 1
        if str(error) != self._last_error:
            logger.warning(
                "a notification was not delivered, and is retried for a day: receiver=%s %s",
                self.name,
                error,
            )
        self._last_error = str(error)


class Notifier:
    """Notifies all receivers of one controller."""

    def __init__(
        self, service: Service, settings: Notify, folder: Path, *, send: Send = senders.send
    ) -> None:
        self._service = service
        self._page = settings.page
        self._file = folder / FILE_NAME
        self._send = send
        logs = self._read(service.now_s) if settings.receivers else {}
        self._channels = [
            Channel(name, receiver, logs.get(name) or SentLog(service.now_s))
            for name, receiver in settings.receivers.items()
        ]

    def counts(self) -> dict[tuple[str, str], int]:
        """Messages by receiver and outcome (sent, failed), since this controller started."""
        return {
            (channel.name, outcome): number
            for channel in self._channels
            for outcome, number in channel.counts.items()
        }

    async def run(self) -> None:
        """Send what is due for as long as the controller lives."""
        if not self._channels:
            return
        self._write()
        try:
            while True:
                try:
                    self._poll()
                except Exception as error:  # noqa: BLE001  # a mistake of ours must not be the last poll
                    self._service.guard.note("notifications", error)
                await asyncio.sleep(POLL_PERIOD_S)
        finally:
            for channel in self._channels:
                if channel.task is not None:
                    channel.task.cancel()

    def _poll(self) -> None:
        now_s = self._service.now_s
        since_s = min(channel.log.since_s for channel in self._channels)
        events = list(job_events(self._service.state, since_s))
        for channel in self._channels:
            if messages := channel.due(events, now_s):
                channel.task = asyncio.create_task(self._deliver(channel, messages))

    async def _deliver(self, channel: Channel, messages: Sequence[Message]) -> None:
        for message in messages:
            try:
                await _in_thread(partial(self._send, channel.receiver, message, self._page))
            except senders.PartlyDeliveredError as error:
                logger.warning("a notification: receiver=%s %s", channel.name, error)
            except senders.DeliveryError as error:
                channel.failed(error, self._service.now_s)
                return
            except Exception as error:  # noqa: BLE001  # not to be retried each second
                self._service.guard.note("notifications", error)
                channel.failed(senders.DeliveryError(repr(error)), self._service.now_s)
                return
            channel.delivered(message, self._service.now_s)
            self._write()

    def _read(self, now_s: float) -> dict[str, SentLog]:
        try:
            document = json.loads(self._file.read_text())
            return {
                str(name): SentLog(
                    # Not in the future of a clock that was set back since.
                    min(float(each["since_s"]), now_s),
                    {str(key): float(at_s) for key, at_s in each["sent"].items()},
                )
                for name, each in document.items()
            }
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s cannot be read (%s): no event before now is sent", self._file, error)
            return {}

    def _write(self) -> None:
        document = {
            channel.name: {"since_s": channel.log.since_s, "sent": channel.log.sent}
            for channel in self._channels
        }
        try:
            state_dir.write_whole(self._file, document)
        except OSError as error:
            logger.warning(
                "%s cannot be written (%s): a restart may send messages twice", self._file, error
            )


async def _in_thread(call: Callable[[], None]) -> None:
    """Run a call that blocks, in a thread that does not keep the controller from stopping.

    `asyncio.to_thread` would: its threads are waited for, and a receiver that does not answer
    takes its timeout.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            call()
        except Exception as raised:  # noqa: BLE001  # it is raised again where it is awaited
            error = raised
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:
            # The controller has stopped meanwhile; the message is sent at its next start.
            logger.debug("a notification ended after the controller")

    threading.Thread(target=run, name="notification", daemon=True).start()
    await done
