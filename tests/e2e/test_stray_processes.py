"""What the ranks of a script have started is gone before the next attempt.

With a cgroup for each worker where this machine permits that, and without.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster
from tests.e2e.script_jobs import (
    EXAMPLES,
    HOLDING,
    log_of,
    submit,
    succeeded,
    wait_step,
)

pytestmark = pytest.mark.timeout(300)

LEAVING = HOLDING.with_name("leaving.py")
STRUCK = 12


@pytest.fixture(scope="module", params=["cgroups", "no cgroups"])
def process(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Controller]:
    option, command = QUICKLY_CHECKED
    is_with = request.param == "cgroups"
    agent = command if is_with else f"{command} --no-cgroups"
    state_dir = tmp_path_factory.mktemp("stray") / "state"
    nodes = ("--local-nodes", "1", "--workers-per-node", "2")
    with controller(state_dir, *nodes, option, agent) as it:
        Cluster(state_dir, lambda: it.grpc).wait_nodes(1)
        log = (state_dir / "nodes" / "node-0" / "agent.log").read_text()
        if is_with and "cgroups of workers: below" not in log:
            pytest.skip("this machine has no cgroup v2 that may be written to")
        yield it


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_what_a_rank_has_started_is_gone_before_the_next_attempt(
    process: Controller, tmp_path: Path, number: signal.Signals
) -> None:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    options = ["--checkpoint", str(tmp_path / "checkpoint"), "--steps", "20"]
    script = [str(LEAVING), str(tmp_path), str(EXAMPLES / "data_workers.py"), *options]
    held = [str(HOLDING), f"{STRUCK}", str(tmp_path / "go"), *script]
    resources = {"nodes": 1, "workers_per_node": 2}
    job_id = submit(cluster, "python", *held, resources=resources)
    wait_step(cluster, job_id, STRUCK)
    ranks = [psutil.Process(present.pid) for present in cluster.presents(job_id, 1)]
    workers = [child.pid for rank in ranks for child in rank.children()]
    assert len(workers) == 4, "two of a DataLoader in each rank"
    noted = [pid for path in tmp_path.glob("0-*.pids") for pid in path.read_text().split()]
    assert len(noted) == 4
    assert all(psutil.pid_exists(int(pid)) for pid in noted)
    (tmp_path / "workers.pids").write_text(" ".join(map(str, workers)))
    os.kill(ranks[1].pid, number)
    (tmp_path / "go").touch()
    assert succeeded(cluster, job_id).attempt == 2
    for rank in (0, 1):
        assert _looks(log_of(cluster, job_id, rank)) == ["still there:", "still there:"]


def _looks(log: str) -> list[str]:
    """What a rank found of earlier attempts, at the start of each of its own."""
    return [line.rstrip() for line in log.splitlines() if line.startswith("still there:")]
