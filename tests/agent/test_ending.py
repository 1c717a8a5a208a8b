"""An agent that is asked to end does all that it can, whatever of it fails."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.agent.observe.links import Links
from controller.agent.observe.metrics import page
from controller.agent.observe.metrics.host import Folders
from controller.agent.observe.metrics.page import Metrics, MetricsAddressError
from controller.agent.workers import processes
from controller.agent.workers.processes import wait_gone
from controller.agent.workers.standby_link import StandbyLink
from tests.agent.faults.node import Node


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """An agent in a thread of this process."""
    level = logging.getLogger().level
    (tmp_path / "data").mkdir()
    node = Node(tmp_path)
    yield node
    node.close()
    logging.getLogger().setLevel(level)


def test_part_that_fails_to_end_keeps_no_other_from_its_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    assert node.wait_up(), node.error
    first = node.controller.hellos[-1].incarnation
    end = StandbyLink.stop

    async def fail(self: StandbyLink, timeout_s: float) -> None:
        await end(self, timeout_s)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(StandbyLink, "stop", fail)
        node.stop()
    assert node.error is None, "it was asked to end, and has"
    assert any("did not end in order" in line for line in node.said.lines)
    # The folder is free, and the next agent can say that the end was an orderly one.
    node.start()
    assert node.wait_up(), node.error
    assert node.controller.hellos[-1].predecessor == first


def test_agent_that_fails_as_it_starts_leaves_no_process_and_no_lock(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[StandbyLink] = []
    start = StandbyLink.start

    def note(self: StandbyLink) -> None:
        start(self)
        started.append(self)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(StandbyLink, "start", note)
        node.start()
        assert not node.wait_up()
    assert "can't start new thread" in str(node.error)
    assert [link.pid for link in started] == [None]
    node.start()
    assert node.wait_up(), node.error


def test_process_is_gone_though_its_descriptor_cannot_be_closed_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[int] = []

    def close(handle: int) -> None:
        os.close(handle)
        closed.append(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    faulty = SimpleNamespace(**{**vars(os), "close": close})
    monkeypatch.setattr(processes, "os", faulty)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        asyncio.run(wait_gone(process.pid))
    assert closed


def test_metrics_page_without_a_thread_to_serve_it_says_where_it_was_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("can't start new thread")

    async def serve() -> None:
        folders = Folders(state_dir=tmp_path, memory_dir=tmp_path, data_dir=tmp_path)
        links = Links(lambda event, weight: None, list, None)
        Metrics(lambda: pytest.fail("nobody asks"), folders, links).serve("127.0.0.1", 0)

    monkeypatch.setattr(page, "start_http_server", no_thread)
    with pytest.raises(MetricsAddressError, match=r"127.0.0.1:0: can't start new thread"):
        asyncio.run(serve())
