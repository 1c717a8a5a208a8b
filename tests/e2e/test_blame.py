"""Which node a fault of an agent is booked on, in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
