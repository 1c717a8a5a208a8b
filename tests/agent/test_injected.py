"""System calls of a start that fail: nothing is left behind, and the next start works."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controller.agent.config import AgentConfig, Limits
from controller.agent.mistakes import Mistakes
from controller.agent.observe.oom import OomKills
from controller.agent.workers import launch, supervisor
from controller.agent.workers.cgroups import WorkerCgroups
from controller.agent.workers.processes import process_state
from controller.agent.workers.standby_events import StandbyError, StandbyEvents
from controller.agent.workers.standby_link import StandbyLink
from controller.agent.workers.supervisor import Supervisor
from controller.agent.workers.worker_events import WorkerEvents
from tests.agent.harness import DEADLINE_S, start_command

CALLS: dict[str, tuple[Any, str]] = {
    "holding a worker": (os, "pidfd_open"),
    "looking for killed workers": (OomKills, "began"),
    "reading what a worker left": (supervisor, "post_mortem"),
}


def fail_once(number: int, call: Callable[..., Any]) -> Callable[..., Any]:
    left = [1]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return call(*args, **kwargs)

    return failing


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO, errno.EAGAIN])
@pytest.mark.parametrize("where", list(CALLS))
def test_start_beside_a_call_that_fails_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    config = AgentConfig(
        node="n0",
        controller="127.0.0.1:1",
        state_dir=tmp_path,
        memory_dir=tmp_path / "memory",
        data_dir=tmp_path,
        workers=2,
        limits=Limits(standby_ready_s=DEADLINE_S),
    )
    ended: list[int] = []
    said: dict[int, str] = {}

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            link = StandbyLink(
                arguments=("--entry=tests.agent.entry:run", "--preload="),
                rendezvous_fd=listening.fileno(),
                interface="lo",
                log_path=tmp_path / "standby.log",
                events=StandbyEvents(
                    started=lambda: None,
                    died=lambda: None,
                    exited=lambda key, status: workers.worker_exited(key, status),
                    running=lambda: (),
                ),
                mistakes=Mistakes(),
            )
            workers = Supervisor(
                limits=config.limits,
                standby=link,
                events=WorkerEvents(
                    requested=lambda made: None,
                    exited=lambda one: ended.append(one.pid or 0),
                    kept_ended=lambda one: None,
                    forked=lambda one: None,
                    not_forked=lambda one: None,
                    changed=lambda: None,
                ),
                oom_kills=OomKills(),
                cgroups=WorkerCgroups(tmp_path),
                mistakes=Mistakes(),
            )
            link.start()
            try:
                await link.wait_ready(DEADLINE_S)
                owner, name = CALLS[where]
                monkeypatch.setattr(owner, name, fail_once(number, getattr(owner, name)))
                for attempt in (1, 2):
                    launches = launch.make_launches(
                        config,
                        start_command(attempt),
                        device="cpu",
                        rendezvous_fd=listening.fileno(),
                        requested_ns=0,
                    )
                    try:
                        await workers.start(launches)
                    except (StandbyError, OSError) as error:
                        said[attempt] = str(error)
                    assert len(workers.running()) == (0 if attempt in said else 2)
                    await workers.stop_all()
                    assert workers.running() == []
            finally:
                await workers.stop_all()
                await link.stop(5.0)

    asyncio.run(run())
    # Only the first may have failed, and says why.
    assert said.keys() <= {1}
    assert all(os.strerror(number) in words for words in said.values())
    # Each of them was told, and none of their processes is there.
    assert len(ended) == 4
    assert not any(process_state(pid) for pid in ended)
