"""A rank waits for what its agent fetches, and for no agent that is dead."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from checkpoint.restore.fetching import Fetching, await_fetched
from outlast.errors import RetryableError


def test_nothing_is_waited_for_where_nothing_is_fetched(tmp_path: Path) -> None:
    await_fetched(tmp_path / "none", 0.0)
    Fetching(tmp_path).end()
    await_fetched(tmp_path, 0.0)


def test_a_rank_goes_on_when_the_fetch_has_ended(tmp_path: Path) -> None:
    fetching = Fetching(tmp_path)
    done = threading.Event()

    def wait() -> None:
        await_fetched(tmp_path, 30.0)
        done.set()

    rank = threading.Thread(target=wait)
    rank.start()
    with pytest.raises(RetryableError, match=r"still being fetched .* after 0\.05 s"):
        await_fetched(tmp_path, 0.05)
    assert not done.is_set()
    fetching.end()
    fetching.end()
    rank.join(30.0)
    assert done.is_set()


def test_a_dead_agent_holds_nobody_up(tmp_path: Path) -> None:
    program = (
        "import pathlib, signal, sys; from checkpoint.restore.fetching import Fetching;"
        "held = Fetching(pathlib.Path(sys.argv[1])); print('held', flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"held\n"
        with pytest.raises(RetryableError):
            await_fetched(tmp_path, 0.0)
        agent.send_signal(signal.SIGKILL)
    await_fetched(tmp_path, 5.0)
