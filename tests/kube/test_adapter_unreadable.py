"""Objects that cannot be read: skipped, counted, and no sign against anybody."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from controller.failure import Failure
from controller.kube.api import Kind, Listing
from controller.kube.informer import Informer
from controller.kube.observed import Host, Json, read_host
from tests.kube.fleets import HURRIED


def host(name: str, **changes: object) -> Json:
    """A healthy one."""
    ready = {"type": "Ready", "status": "True"}
    document: Json = {
        "metadata": {"name": name, "resourceVersion": "1"},
        "status": {"conditions": [ready]},
    }
    return document | changes


class Watching:
    """A watch that gives some events, and then nothing until it is ended."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events
        self._ended = threading.Event()

    def __iter__(self) -> Watching:
        return self

    def __next__(self) -> Any:
        if self._events:
            return self._events.pop(0)
        self._ended.wait()
        raise StopIteration

    def end(self) -> None:
        self._ended.set()


class Server:
    """Lists some hosts, and then says some things about them."""

    def __init__(self, items: list[Any], events: list[Any]) -> None:
        self._items = items
        self._events = events

    def list(self, kind: Kind) -> Listing:
        return Listing(items=tuple(self._items), version="1")

    def watch(self, kind: Kind, version: str) -> Any:
        return Watching(self._events)


UNREADABLE: dict[str, Callable[[str], Any]] = {
    "no status of a condition": lambda name: host(name, status={"conditions": [{"type": "Ready"}]}),
    "a time that is none": lambda name: host(
        name, metadata={"name": name, "resourceVersion": "2", "creationTimestamp": "yesterday"}
    ),
    "taints that are a number": lambda name: host(name, spec={"taints": 7}),
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_host_that_cannot_be_read_is_skipped_and_stays_as_it_was(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = UNREADABLE[what]

    async def scenario() -> None:
        events = [
            {"type": "MODIFIED", "object": bad("known")},
            {"type": "MODIFIED", "object": {}},
            {"type": "ADDED", "object": host("later")},
        ]
        counts: Counter[tuple[str, str]] = Counter()
        failure = Failure()
        informer: Informer[Host] = Informer(
            Server([host("known"), bad("never")], events),
            Kind(name="nodes", path="/nodes"),
            read_host,
            HURRIED,
            on_change=lambda: None,
            failure=failure,
            counts=counts,
        )
        informer.start()
        async with asyncio.timeout(30):
            while "later" not in informer.objects:
                await asyncio.sleep(0.001)
        assert set(informer.objects) == {"known", "later"}
        assert informer.objects["known"].not_ready == ""
        assert counts["Read nodes", "failed"] == 3
        await informer.stop()

    asyncio.run(scenario())
    assert "object skipped" in caplog.text
