"""With `recovery.heal`, the ranks that a fault leaves alive keep their processes."""

from __future__ import annotations

import os
import signal

import pytest

from tests.chaos.orders import Desk
from tests.e2e.cluster import Cluster, wait_for

# Four ranks on two nodes, two of each in a stage.
JOB = {
    "parallel": {"dp": 2, "pp": 2, "micro_batch": 2},
    "model": {"layers": 2},
    "resources": {"workers_per_node": 2},
}
HEALING = {**JOB, "recovery": {"heal": True}}


@pytest.fixture(scope="module")
def workers_per_node() -> int:
    return 2


@pytest.fixture(scope="module")
def fault_free(cluster: Cluster) -> dict[int, float]:
    job_id = cluster.submit(**JOB)
    cluster.wait_state(job_id, "SUCCEEDED")
    return cluster.losses(job_id)


def test_only_the_rank_that_dies_has_a_new_process(
    cluster: Cluster, fault_free: dict[int, float], slowest_steps: Desk
) -> None:
    job_id = cluster.submit(**HEALING)
    cluster.wait_step(job_id, 10)
    before = [present.pid for present in cluster.presents(job_id, 1)]
    os.kill(before[2], signal.SIGKILL)
    slowest_steps.speed_up()
    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert job.attempt == 2
    after = [present.pid for present in cluster.presents(job_id, 2)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False, True]
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, incident.action) == ("worker_killed", "restart_in_place")
    assert incident.steps_redone <= 1
    assert cluster.losses(job_id) == fault_free


def test_of_a_hang_only_the_rank_that_stands_has_a_new_process(
    cluster: Cluster, fault_free: dict[int, float], slow_steps: Desk
) -> None:
    job_id = cluster.submit(**HEALING, name="stands")
    cluster.wait_step(job_id, 10)
    before = [present.pid for present in cluster.presents(job_id, 1)]
    os.kill(before[1], signal.SIGSTOP)
    wait_for(lambda: cluster.job(job_id).attempt == 2, "the next attempt")
    slow_steps.speed_up()
    cluster.wait_state(job_id, "SUCCEEDED")
    after = [present.pid for present in cluster.presents(job_id, 2)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True, True]
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == "hang"
    assert cluster.losses(job_id) == fault_free


def test_processes_that_were_kept_end_where_the_job_does_not_go_on(
    cluster: Cluster, slowest_steps: Desk
) -> None:
    """Its budget is spent, so it is paused; then it is resumed from host memory."""
    job_id = cluster.submit(
        **{**HEALING, "recovery": {"heal": True, "ladder": ["pause"]}}, name="paused"
    )
    cluster.wait_step(job_id, 10)
    before = [present.pid for present in cluster.presents(job_id, 1)]
    os.kill(before[1], signal.SIGKILL)
    cluster.wait_state(job_id, "PAUSED")
    cluster.wait_gone(before)
    slowest_steps.speed_up()
    with cluster.client as client:
        client.resume(job_id)
    cluster.wait_state(job_id, "SUCCEEDED")
