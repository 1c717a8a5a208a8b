"""A cache of one kind of objects that keeps up: list, watch from there, list again.

A watch can end in order, expire (410), break, or be dead without a word; each
of these is normal here. After an orderly end it goes on from the last version
that was seen, bookmarks included; after anything else everything is listed
again, and what the cache then holds is the truth, whatever was missed. A thread
reads; the cache itself is touched in the loop only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from controller.failure import Failure
from controller.kube.api import Kind, Listing, WatchStream
from controller.kube.config import Patience
from controller.kube.errors import KubeError
from controller.kube.observed import Json
from controller.ratelimit import RateLimitedLog

logger = logging.getLogger(__name__)

_JOIN_S = 5.0
OK, FAILED = "ok", "failed"

T = TypeVar("T")


class Source(Protocol):
    """Where objects are listed and watched."""

    def list(self, kind: Kind) -> Listing: ...

    def watch(self, kind: Kind, version: str) -> WatchStream: ...


class Informer(Generic[T]):
    """Objects of a kind by name, as new as the last thing that was heard."""

    def __init__(
        self,
        source: Source,
        kind: Kind,
        read: Callable[[Json], T],
        patience: Patience,
        *,
        on_change: Callable[[], None],
        failure: Failure,
        counts: Counter[tuple[str, str]],
    ) -> None:
        """`read` makes what is kept of an object. All in the loop: `on_change` is called,
        `failure` hears what ended the reading for good, and `counts` counts lists, and
        what ended a watch out of order, by name and result."""
        self.objects: dict[str, T] = {}
        self.is_synced = False
        self._source = source
        self._kind = kind
        self._read = read
        self._patience = patience
        self._on_change = on_change
        self._failure = failure
        self._counts = counts
        self._log = RateLimitedLog(logger)
        self._stop = threading.Event()
        self._stream: WatchStream | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Daemon: a call that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"watch-{kind.name}", daemon=True)

    def start(self) -> None:
        """Begin to read; `is_synced` once everything has been listed."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread, which may be in the middle of a call."""
        self._stop.set()
        if self._stream is not None:
            self._stream.end()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _JOIN_S)

    # In the thread

    def _run(self) -> None:
        try:
            self._keep_up()
        except Exception as error:  # noqa: BLE001  # the boundary: whatever it is, it is reported
            # The thread's end would go unnoticed, and its last report be trusted for ever.
            self._in_loop(self._failure.note, error)

    def _keep_up(self) -> None:
        pause_s = self._patience.retry_s
        while not self._stop.is_set():
            try:
                listed_s = time.monotonic()
                listing = self._source.list(self._kind)
                named = dict(filter(None, map(self._readable, listing.items)))
                self._in_loop(self._replace, named)
                pause_s = self._patience.retry_s
                self._follow(listing.version, listed_s + self._patience.resync_s)
            except KubeError as error:
                if self._stop.is_set():
                    return
                self._in_loop(self._count, FAILED)
                logger.warning(
                    "%s are listed again: pause_s=%.1f %s", self._kind.name, pause_s, error
                )
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, self._patience.retry_max_s)

    def _follow(self, version: str, until_s: float) -> None:
        """Watch from a version, again and again, until everything is to be listed anew."""
        while not self._stop.is_set() and time.monotonic() < until_s:
            begun_s = time.monotonic()
            self._stream = stream = self._source.watch(self._kind, version)
            if self._stop.is_set():
                stream.end()
            for event in stream:
                version = self._take(event) or version
            if time.monotonic() - begun_s < self._patience.retry_s:
                # A server that ends every watch at once is not asked in a tight loop.
                self._stop.wait(self._patience.retry_s)

    def _take(self, event: Json) -> str | None:
        """Take one event of a watch in; its version, if it can be read."""
        try:
            metadata, kind = event["object"]["metadata"], event["type"]
            version, name = str(metadata["resourceVersion"]), metadata.get("name")
        except (KeyError, TypeError, AttributeError) as error:
            self._cannot_read("?", error)
            return None
        if kind == "DELETED":
            self._in_loop(self._change, name, None)
        elif kind != "BOOKMARK" and (known := self._readable(event["object"])) is not None:
            self._in_loop(self._change, *known)
        return version

    def _readable(self, item: Json) -> tuple[str, T] | None:
        """The name of an object and what is kept of it.

        One that cannot be read stays as it was last seen: if it seemed to be gone instead,
        that would be a sign against its node. None when it was never seen.
        """
        name = "?"
        try:
            name = str(item["metadata"]["name"])
            return name, self._read(item)
        except Exception as error:  # noqa: BLE001  # anybody may write objects, and controllers of others do
            self._cannot_read(name, error)
        known = self.objects.get(name)
        return None if known is None else (name, known)

    def _cannot_read(self, name: str, error: Exception) -> None:
        self._in_loop(self._count, FAILED, "Read")
        self._log.warning(
            (self._kind.name, name),
            "object skipped, it cannot be read: kind=%s name=%s error=%r",
            self._kind.name,
            name,
            error,
        )

    def _in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "start comes first"
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The loop has ended; so has this informer.
            self._stop.set()

    # In the loop

    def _count(self, result: str, what: str = "List") -> None:
        self._counts[f"{what} {self._kind.name}", result] += 1

    def _replace(self, objects: dict[str, T]) -> None:
        self.objects = objects
        self.is_synced = True
        self._count(OK)
        self._on_change()

    def _change(self, name: str, item: T | None) -> None:
        if item is None:
            self.objects.pop(name, None)
        else:
            self.objects[name] = item
        self._on_change()
