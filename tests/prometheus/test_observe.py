"""`outlast up --observe`: Prometheus comes and goes with the controller."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.agent.workers.processes import process_name
from controller.local.processes import kill, members_of
from outlast.cli.errors import CliError
from tests.controller.processes import is_alive, node_pids
from tests.e2e.cluster import DEADLINE_S, wait_for
from tests.prometheus.servers import Api, prometheus
from tests.prometheus.tools import ROOT, RULES, needs_prometheus

pytestmark = [needs_prometheus, pytest.mark.timeout(240)]


@contextmanager
def up(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """`outlast up --observe` with one node, and what it prints."""
    state_dir, printed = folder / "state", folder / "printed"
    command = [sys.executable, "-m", "outlast.cli.main", "up", "--observe"]
    command += ["--nodes", "1", "--workers-per-node", "1", "--standby", "0"]
    command += ["--state-dir", str(state_dir), "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    with printed.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
    try:
        yield process, printed
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pid in members_of(list(node_pids(state_dir).values())):
            kill(pid)


def address_in(printed: Path) -> str:
    def told() -> str:
        found = re.search(r"Prometheus scrapes it: http://(\S+) ", printed.read_text())
        return found[1] if found else ""

    return wait_for(told, f"Prometheus to be ready: {printed.read_text()}")


def prometheus_of(state_dir: Path) -> int:
    """The pid of the Prometheus whose data lie below the state folder."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or process_name(int(entry.name)) is None:
            continue
        try:
            command = (entry / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if f"--storage.tsdb.path={state_dir}" in command:
            return int(entry.name)
    raise AssertionError("no Prometheus runs")


def test_prometheus_finds_controller_and_nodes_and_ends_with_them(tmp_path: Path) -> None:
    with up(tmp_path) as (process, printed):
        api = Api(address_in(printed))
        assert api.address.startswith("127.0.0.1:")
        wait_for(lambda: len(api.now("up == 1")) == 2, "controller and agent to be scraped")
        assert len(api.get("rules")["groups"]) >= 5
        pid = prometheus_of(tmp_path / "state")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        assert not is_alive(pid)


def test_another_prometheus_that_took_the_port_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prometheus(tmp_path / "theirs", "127.0.0.1:1", RULES / "rules") as theirs:
        port = int(theirs.address.rpartition(":")[2])
        monkeypatch.setattr("outlast.cli.observe._port", lambda wanted: port)
        with (
            pytest.raises(
                CliError, match=r"Prometheus ended at once:(?s:.*)address already in use"
            ),
            prometheus(tmp_path / "ours", "127.0.0.1:1", RULES / "rules"),
        ):
            pass


def test_prometheus_dies_with_a_controller_that_is_killed(tmp_path: Path) -> None:
    with up(tmp_path) as (process, printed):
        address_in(printed)
        pid = prometheus_of(tmp_path / "state")
        process.kill()
        wait_for(lambda: not is_alive(pid), "Prometheus to end")
