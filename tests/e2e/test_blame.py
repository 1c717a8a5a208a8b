"""Which node a fault of an agent is booked on, in real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.blackbox import Reader
from outlast.v1.jobs_pb2 import Job
from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import HandNodes, hand_nodes
from tests.e2e.cluster import Cluster, wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Controller]:
    with controller(tmp_path / "state") as it:
        yield it


@pytest.fixture
def nodes(process: Controller, tmp_path: Path) -> Iterator[HandNodes]:
    with hand_nodes(process, tmp_path, "node-a", "node-b") as it:
        yield it


@pytest.fixture
def cluster(process: Controller, nodes: HandNodes) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(2)
    return cluster


def test_an_agent_killed_and_restarted_at_once_is_blamed_and_not_the_rank_that_lost_its_peer(
    cluster: Cluster, nodes: HandNodes
) -> None:
    # An agent takes seconds to be back on a machine that does much else.
    patient = {"stop_timeout_s": 60, "heartbeat_lost_s": 40, "heartbeat_silent_s": 60}
    job_id = cluster.submit(steps=100_000, recovery=patient)
    cluster.wait_step(job_id, 10)
    nodes.kill("node-b")
    nodes.start("node-b")
    wait_for(lambda: cluster.job(job_id).attempt > 1, "the next attempt")
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, list(incident.culprit_nodes)) == ("workers_missing", ["node-b"])
    assert "the agent of node-b was restarted" in incident.reason
    with cluster.client as client:
        states = {node.node_id: node.state for node in client.nodes()}
        client.cancel(job_id)
    assert states == {"node-a": "ASSIGNED", "node-b": "SUSPECT"}
    cluster.wait_state(job_id, "CANCELLED")


def test_agents_that_all_restart_while_nodes_are_checked_cost_no_attempt(
    cluster: Cluster, nodes: HandNodes, tmp_path: Path
) -> None:
    """The next attempt must get the rendezvous port that the new agent of its node holds."""
    patient = {
        "stop_timeout_s": 60,
        "heartbeat_lost_s": 60,
        "heartbeat_silent_s": 90,
        "ladder": ["diagnose", "replace", "pause"],
    }
    job_id = cluster.submit(steps=100_000, recovery=patient)
    cluster.wait_step(job_id, 10)
    (path,) = tmp_path.glob(f"*/state/jobs/{job_id}/a1/rank-00001.blackbox")
    box = Reader(path)
    os.kill(box.present().pid, signal.SIGKILL)
    box.close()
    wait_for(lambda: cluster.job(job_id).state == "DIAGNOSING", "the checks of the nodes")
    for node in ("node-a", "node-b"):
        nodes.kill(node)
    # They are away when the checks would end, so that the old port is all that is known.
    wait_for(lambda: not _connected(cluster), "the controller to miss both agents")
    for node in ("node-a", "node-b"):
        nodes.start(node)
    job = wait_for(lambda: _trains(cluster, job_id, attempt=2), "the next attempt to train")
    assert job.attempt == 2
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == "worker_killed"
    with cluster.client as client:
        # No node but the one whose worker was killed has done anything.
        suspects = [node.node_id for node in client.nodes() if node.state == "SUSPECT"]
        client.cancel(job_id)
    assert set(suspects) <= set(incident.culprit_nodes)
    cluster.wait_state(job_id, "CANCELLED")


def _connected(cluster: Cluster) -> list[str]:
    with cluster.client as client:
        return [node.node_id for node in client.nodes() if node.connected]


def _trains(cluster: Cluster, job_id: str, *, attempt: int) -> Job | None:
    """The job, once an attempt that is not older has completed a step."""
    job = cluster.job(job_id)
    return job if job.attempt >= attempt and job.state == "RUNNING" else None
