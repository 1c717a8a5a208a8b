"""A controller that a command starts for itself ends with it, and so do its nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.local.cluster import LocalConfig
from controller.local.processes import members_of
from outlast.cli.embedded import EmbeddedController, StartCancelledError
from outlast.cli.errors import CliError
from outlast.client import Client
from tests.e2e.cluster import wait_for

_OWNER = """
import sys, time
from pathlib import Path
from outlast.cli.embedded import EmbeddedController
embedded = EmbeddedController(Path(sys.argv[1]), nodes=1, workers_per_node=1)
embedded.start()
print(embedded.pid, embedded.wait_address(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedController]:
    it = EmbeddedController(tmp_path / "state", nodes=1, workers_per_node=1)
    it.start()
    yield it
    it.kill()


def sessions_of(state_dir: Path, address: str) -> list[int]:
    """Sessions of the nodes, once their agents are connected."""
    with Client(address) as client:
        wait_for(lambda: any(node.connected for node in client.nodes()), "the node to join")
    files = state_dir.glob("nodes/*/process.json")
    return [json.loads(file.read_text())["pid"] for file in files]


def host_memory(state_dir: Path) -> Path:
    return LocalConfig(
        state_dir=state_dir, nodes=1, workers_per_node=1, controller_address=""
    ).memory_dir


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_nothing_is_left_of_it(embedded: EmbeddedController, how: str) -> None:
    sessions = sessions_of(embedded.state_dir, embedded.wait_address())
    assert members_of(sessions)
    assert host_memory(embedded.state_dir).is_dir()
    getattr(embedded, how)()
    assert not members_of([*sessions, embedded.pid])
    assert not host_memory(embedded.state_dir).exists()


def test_nodes_end_with_a_controller_that_was_killed(embedded: EmbeddedController) -> None:
    sessions = sessions_of(embedded.state_dir, embedded.wait_address())
    os.kill(embedded.pid, signal.SIGKILL)

    def ended() -> bool:
        try:
            embedded.check()
        except CliError as error:
            return "ended with code -9" in str(error)
        return False

    wait_for(ended, "its end to be noticed")
    assert members_of(sessions)
    embedded.stop()
    assert not members_of(sessions)


def test_all_ends_with_a_command_that_was_killed(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(state_dir)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    pid, address = owner.stdout.readline().split()
    sessions = [int(pid), *sessions_of(state_dir, address)]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_for(lambda: not members_of(sessions), "all processes to end")
    assert not host_memory(state_dir).exists()


def test_a_start_that_is_cancelled_is_not_waited_for(
    embedded: EmbeddedController,
) -> None:
    begun_s = time.monotonic()
    with pytest.raises(StartCancelledError):
        embedded.wait_address(lambda: time.monotonic() > begun_s)


def test_a_start_that_fails_shows_why(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    embedded = EmbeddedController(tmp_path / "state", nodes=1, workers_per_node=1)
    embedded.start()
    with pytest.raises(CliError, match=r"the state directory .* cannot be written"):
        embedded.wait_address()
    embedded.stop()


def test_standard_input_that_cannot_end_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "outlast.cli.main", "up", "--stop-with-stdin"),
            *("--nodes", "1", "--state-dir", str(tmp_path), "--grpc", "127.0.0.1:0"),
            *("--http", "127.0.0.1:0"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--stop-with-stdin takes a pipe or a terminal" in done.stderr
