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
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from controller.kube.api import Kind, Listing, WatchStream
from controller.kube.config import Patience
from controller.kube.errors import KubeError
from controller.kube.observed import Json

logger = logging.getLogger(__name__)

_JOIN_S = 5.0
OK, FAILED = "ok", "failed"

T = TypeVar("T")


class Source(Protocol):
    """Where objects are listed and watched."""

    def list(self, kind: Kind) -> Listing: ...

    def watch(self, kind: Kind, version: str) -> WatchStream: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    items: tuple[Json, ...]


class Informer(Generic[T]):
    """Objects of a kind by name, as new as the last thing that was heard."""

    def __init__(
        self,
        source: Source,
        kind: Kind,
        read: Callable[[Json], T],
        patience: Patience,
        on_change: Callable[[], None],
        counts: Counter[tuple[str, str]],
    ) -> None:
        """`read` makes what is kept of an object; `on_change` is called in the loop;
        `counts` counts lists, and what ended a watch out of order, by name and result."""
        self.objects: dict[str, T] = {}
        self.is_synced = False
        self._source = source
        self._kind = kind
        self._read = read
        self._patience = patience
        self._on_change = on_change
        self._counts = counts
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
        pause_s = self._patience.retry_s
        what = f"List {self._kind.name}"
        while not self._stop.is_set():
            try:
                listed_s = time.monotonic()
                listing = self._source.list(self._kind)
                self._counts[what, OK] += 1
                self._tell(_Listed(items=listing.items))
                pause_s = self._patience.retry_s
                self._follow(listing.version, listed_s + self._patience.resync_s)
            except KubeError as error:
                if self._stop.is_set():
                    return
                self._counts[what, FAILED] += 1
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
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    self._tell(event)
            if time.monotonic() - begun_s < self._patience.retry_s:
                # A server that ends every watch at once is not asked in a tight loop.
                self._stop.wait(self._patience.retry_s)

    def _tell(self, news: _Listed | Json) -> None:
        assert self._loop is not None, "start comes first"
        try:
            self._loop.call_soon_threadsafe(self._take, news)
        except RuntimeError:
            # The loop has ended; so has this informer.
            self._stop.set()

    # In the loop

    def _take(self, news: _Listed | Json) -> None:
        if isinstance(news, _Listed):
            self.objects = {item["metadata"]["name"]: self._read(item) for item in news.items}
            self.is_synced = True
        elif news["type"] == "DELETED":
            self.objects.pop(news["object"]["metadata"]["name"], None)
        else:
            self.objects[news["object"]["metadata"]["name"]] = self._read(news["object"])
        self._on_change()
