"""The process that reads data for the ranks of a node is killed, and training does not feel it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.chaos.orders import Desk
from tests.controller.processes import controller
from tests.e2e.cluster import Cluster, wait_for

pytestmark = pytest.mark.timeout(400)

# Two tensor-parallel ranks of one replica, on one node.
PARALLEL = {"dp": 1, "tp": 2, "micro_batch": 2}
RESOURCES = {"nodes": 1, "workers_per_node": 2}
_STARTED = re.compile(r"data loader started: job=(\S+) attempt=1 pid=(\d+)")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, lasting_desk: Desk) -> Iterator[Cluster]:
    state_dir = tmp_path_factory.mktemp("e2e") / "state"
    with controller(state_dir, "--local-nodes", "1", "--workers-per-node", "2") as it:
        cluster = Cluster(it.state_dir, lambda: it.grpc)
        cluster.wait_nodes(1)
        yield cluster


def submit(cluster: Cluster, loader: str) -> str:
    return cluster.submit(
        name=loader, parallel=PARALLEL, resources=RESOURCES, data={"loader": loader}
    )


def loaders(cluster: Cluster, job_id: str) -> list[int]:
    """The processes of all loaders so far, as the agent's log names them."""
    (log,) = cluster.state_dir.glob("nodes/*/agent.log")
    return [int(pid) for job, pid in _STARTED.findall(log.read_text()) if job == job_id]


def rank_log(cluster: Cluster, job_id: str) -> str:
    (path,) = cluster.state_dir.glob(f"nodes/*/jobs/{job_id}/a1/rank-00000.log")
    return path.read_text()


def test_a_loader_that_is_killed_costs_no_step_and_no_rank(
    cluster: Cluster, slowest_steps: Desk
) -> None:
    job_id = submit(cluster, "node")
    cluster.wait_step(job_id, 3)
    pids = [present.pid for present in cluster.presents(job_id, 1)]
    for number in range(1, 6):
        wait_for(lambda n=number: len(loaders(cluster, job_id)) == n, f"loader {number}")
        at = cluster.job(job_id).step
        os.kill(loaders(cluster, job_id)[-1], signal.SIGKILL)
        cluster.wait_step(job_id, at + 2)
    # After the fifth there is none, and each rank reads by itself.
    wait_for(lambda: "this rank reads by itself" in rank_log(cluster, job_id), "ranks to do so")
    assert [present.pid for present in cluster.presents(job_id, 1)] == pids
    slowest_steps.speed_up()
    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert (job.attempt, job.restarts) == (1, 0)
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, incident.action, incident.count) == ("data_stall", "", 5)
    said = [each.detail for each in incident.evidence]
    assert "its data loader ended: killed by SIGKILL" in said[0]
    assert said[0].endswith("it is started again")
    assert "is not started again: each rank reads by itself" in said[-1]
    alone = submit(cluster, "rank")
    cluster.wait_state(alone, "SUCCEEDED")
    assert loaders(cluster, alone) == []
    losses = cluster.losses(job_id)
    assert len(losses) == 60
    assert losses == cluster.losses(alone)
