"""A node whose device reports a fault is checked while its job goes on without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.orders import Desk, Order
from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.held import HELD, UPLOADED

pytestmark = pytest.mark.timeout(400)

# Neither it nor the step of the fault is uploaded.
HELD_STEP = UPLOADED + 6
CHANGES: dict[str, Any] = {
    **HELD,
    "resources": {"standby": 1},
    "checkpoint": {**HELD["checkpoint"], "replicas": 1},
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, lasting_desk: Desk) -> Iterator[Controller]:
    nodes = ("--local-nodes", "3", "--workers-per-node", "1", *QUICKLY_CHECKED)
    with controller(tmp_path_factory.mktemp("swap") / "state", *nodes) as it:
        yield it


@pytest.fixture(scope="module")
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(3)
    return cluster


def states(cluster: Cluster) -> dict[str, str]:
    with cluster.client as client:
        return {node.node_id: node.state for node in client.nodes()}


def logs(cluster: Cluster, job_id: str, attempt: int) -> list[str]:
    folder: Path = cluster.state_dir / "nodes"
    return [path.read_text() for path in folder.glob(f"*/jobs/{job_id}/a{attempt}/rank-*.log")]


def test_a_broken_device_costs_a_standby_and_no_wait_for_checks(
    cluster: Cluster, lasting_desk: Desk
) -> None:
    held = Order(name="held", at="step", act="hold", rank=0, attempt=1, step=HELD_STEP)
    broken = Order(name="broken", at="step", act="break", rank=0, attempt=1, step=HELD_STEP + 4)
    lasting_desk.give((held, broken))
    job_id = cluster.submit(**CHANGES)
    wait_for(lambda: "STANDBY" in states(cluster).values(), "a standby to be checked")
    standby = next(node for node, state in states(cluster).items() if state == "STANDBY")
    suspect = cluster.job(job_id).nodes[0]
    lasting_desk.release()

    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert job.attempt == 2
    assert job.nodes[0] == standby
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, incident.action) == ("device", "swap_nodes")
    assert f"a checked standby takes the place of {suspect}, checked meanwhile" in incident.reason
    assert not incident.diagnostic_run
    phases = [entry.phase for entry in incident.timeline]
    assert "diagnosing" not in phases, phases
    found = logs(cluster, job_id, 2)
    assert len(found) == 2
    assert all("from host memory" in text for text in found), found
    # Its checks found nothing, twice.
    wait_for(lambda: states(cluster)[suspect] in ("READY", "STANDBY"), f"{suspect} to be free")
    lasting_desk.give(())
    again = cluster.submit(**{**CHANGES, "name": "undisturbed"})
    cluster.wait_state(again, "SUCCEEDED")
    assert cluster.losses(job_id) == cluster.losses(again)
