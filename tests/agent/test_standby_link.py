"""The agent's end of the standby process: whatever happens to it, another one is started."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.agent.workers import standby_link
from controller.agent.workers.standby_events import StandbyError
from tests.agent.conftest import StartAgent
from tests.agent.harness import DEADLINE_S, FakeController, start_command, wait_for
from tests.agent.standbys import running


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby_link, "_RESTART_DELAYS_S", (0.0, 0.01, 0.01, 0.01))


def fail_times(number: int, times: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, of which the first calls fail."""
    left = [times]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return call(*args, **kwargs)

    return failing


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EMFILE])
@pytest.mark.parametrize("what", ["process", "sockets"])
def test_standby_that_cannot_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    owner, name = (subprocess, "Popen") if what == "process" else (socket, "socketpair")
    original = getattr(owner, name)

    async def run() -> None:
        failing = fail_times(number, 2, original)
        monkeypatch.setattr(getattr(standby_link, owner.__name__), name, failing)
        async with running(tmp_path) as (link, mistakes):
            # The first that are told hear the cause, in its own words.
            with pytest.raises(StandbyError, match=os.strerror(number)):
                await link.wait_ready(DEADLINE_S)
            await link.wait_ready(DEADLINE_S)
            assert mistakes.counts == {"standby": 2}
            assert link.num_restarts == 2

    asyncio.run(run())


def test_mistake_in_looking_after_a_dead_standby_s_workers_does_not_end_the_watch(
    tmp_path: Path,
) -> None:
    def died() -> None:
        raise ProcessLookupError(errno.ESRCH, "No such process")

    async def run() -> None:
        async with running(tmp_path, died=died) as (link, mistakes):
            await link.wait_ready(DEADLINE_S)
            first = link.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                while link.pid in (first, None):
                    await asyncio.sleep(0.002)
            await link.wait_ready(DEADLINE_S)
            assert mistakes.counts == {"standby": 1}

    asyncio.run(run())


def test_log_that_cannot_be_opened_stops_no_standby(tmp_path: Path) -> None:
    (tmp_path / "standby.log").mkdir()

    async def run() -> None:
        async with running(tmp_path) as (link, mistakes):
            await link.wait_ready(DEADLINE_S)
            assert mistakes.counts == {"standby": 1}

    asyncio.run(run())


def test_start_on_a_node_whose_standby_cannot_import_says_what_it_lacks(
    controller: FakeController, start_agent: StartAgent
) -> None:
    start_agent(controller.start(), "--standby-argument=--preload=no_such_library")
    wait_for(lambda: controller.hellos, "a hello")
    result = controller.result(controller.command(start_command(1)))
    assert not result.ok
    assert "No module named 'no_such_library'" in result.detail
    assert "standby.log" in result.detail
