"""A rack is lost with all that its nodes hold: the copies of their ranks stand elsewhere."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

import pytest

from tests.chaos.orders import Desk
from tests.controller.processes import controller
from tests.e2e.by_hand import QUICK_CHECKS
from tests.e2e.cluster import Cluster
from tests.e2e.losing import lose_node

pytestmark = pytest.mark.timeout(400)

STEPS = 100
STEP_S = 0.2
# Each rank's part of the optimizer is its own, and all ranks are in one group.
CHANGES = {
    "steps": STEPS,
    "model": {"layers": 2, "hidden": 32, "heads": 2, "seq_len": 32},
    "parallel": {"dp": 4, "micro_batch": 1, "zero": {"level": 1}},
    # Nothing gets into storage before the end.
    "checkpoint": {"storage_interval_steps": 1000, "replicas": 1},
}
AGENT = [sys.executable, "-m", "tests.e2e.racked_agent", "--suite-runner", QUICK_CHECKS]
NODES = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, lasting_desk: Desk) -> Iterator[Cluster]:
    nodes = ("--local-nodes", str(NODES), "--workers-per-node", "1")
    state_dir = tmp_path_factory.mktemp("racks") / "state"
    with controller(state_dir, *nodes, "--agent-command", shlex.join(AGENT)) as process:
        cluster = Cluster(process.state_dir, lambda: process.grpc)
        cluster.wait_nodes(NODES)
        yield cluster


def test_a_job_that_loses_a_rack_goes_on_from_the_memory_of_other_racks(
    cluster: Cluster, lasting_desk: Desk
) -> None:
    lasting_desk.slow_down("steps", step_s=STEP_S)
    job_id = cluster.submit(**CHANGES)
    cluster.wait_step(job_id, 10)
    nodes = list(cluster.job(job_id).nodes)
    # In the order of their ranks nodes of a rack are neighbours.
    for node in nodes[:2]:
        lose_node(cluster.state_dir, node)
    lasting_desk.speed_up()

    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert not set(nodes[:2]) & set(job.nodes)
    folder = cluster.state_dir / "nodes"
    logs = [path.read_text() for path in folder.glob(f"*/jobs/{job_id}/a*/rank-*.log")]
    assert sum("from host memory" in text for text in logs) >= 4
    assert not any("from storage" in text for text in logs)
    losses = cluster.losses(job_id)
    again = cluster.submit(**CHANGES)
    cluster.wait_state(again, "SUCCEEDED")
    assert losses == cluster.losses(again)
