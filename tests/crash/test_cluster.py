"""One job on real nodes loses a process of every kind, and ends as if it had lost none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint import catalog
from checkpoint.storage.storage import Storage
from outlast.crashpoints import CrashPoint
from tests.controller.processes import Controller, controller
from tests.crash.orders import Orders
from tests.e2e.cluster import Cluster, wait_for

pytestmark = pytest.mark.timeout(400)

STEPS = 300


@pytest.fixture
def process(
    tmp_path: Path, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Controller]:
    for name, value in orders.environment.items():
        monkeypatch.setenv(name, value)
    # A node whose standby process dies at a start is not trusted again; nor is a dead one.
    nodes = ("--local-nodes", "2", "--standby", "2", "--workers-per-node", "1")
    with controller(tmp_path / "state", *nodes) as it:
        yield it


def test_training_that_loses_one_process_of_each_kind_has_the_same_losses(
    process: Controller, orders: Orders
) -> None:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(4)
    whole = cluster.submit(steps=STEPS)
    cluster.wait_state(whole, "SUCCEEDED")
    expected = cluster.losses(whole)

    orders.give(CrashPoint.STANDBY_FORKED)
    job_id = cluster.submit(steps=STEPS)
    go_on(cluster, job_id, orders, CrashPoint.STANDBY_FORKED, 1)
    die(cluster, job_id, orders, CrashPoint.SLOT_HALF_COPIED)
    # The agent that commits dies: its node is lost, and with it half of the host memory.
    die(cluster, job_id, orders, CrashPoint.MANIFEST_STORED)

    orders.give(CrashPoint.CHANGES_KEPT)
    orders.wait(CrashPoint.CHANGES_KEPT)
    process.kill()
    process.start()
    cluster.wait_state(job_id, "SUCCEEDED")
    assert cluster.losses(job_id) == expected

    storage = Storage(str(cluster.state_dir / "checkpoints" / job_id))
    wait_for(lambda: storage.committed_steps()[:1] == [STEPS], "the last checkpoint")
    assert catalog.verify(storage, STEPS, lambda num_bytes: None) == []


def die(cluster: Cluster, job_id: str, orders: Orders, point: CrashPoint) -> None:
    """A process of the job ends at `point`; the job goes on in another attempt."""
    attempt = cluster.job(job_id).attempt
    orders.give(point)
    go_on(cluster, job_id, orders, point, attempt)


def go_on(cluster: Cluster, job_id: str, orders: Orders, point: CrashPoint, attempt: int) -> None:
    """Wait until a process has ended at `point` and an attempt after this one trains."""
    orders.wait(point)
    wait_for(
        lambda: (job := cluster.job(job_id)).attempt > attempt and job.state == "RUNNING",
        f"another attempt after {point.value}",
    )
    reached = cluster.job(job_id).step
    cluster.wait_step(job_id, reached + 1)
