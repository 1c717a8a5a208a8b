"""With `recovery.heal`, the ranks that a fault leaves alive keep their processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.chaos.orders import Desk
from tests.controller.processes import Controller, controller
from tests.e2e.cluster import Cluster, wait_for

# Four ranks on two nodes, two of each in a stage.
JOB = {
    "parallel": {"dp": 2, "pp": 2, "micro_batch": 2},
    "model": {"layers": 2},
    "resources": {"workers_per_node": 2},
}
HEALING = {**JOB, "recovery": {"heal": True}}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, lasting_desk: Desk) -> Iterator[Controller]:
    """Two nodes, and one that is spare."""
    state_dir = tmp_path_factory.mktemp("e2e") / "state"
    nodes = ("--local-nodes", "2", "--workers-per-node", "2", "--standby", "1")
    with controller(state_dir, *nodes) as it:
        yield it


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


def test_who_leaves_a_node_that_is_drained_is_waited_for_and_nothing_is_done_twice(
    cluster: Cluster, fault_free: dict[int, float], slow_steps: Desk
) -> None:
    job_id = cluster.submit(**HEALING, name="moves")
    cluster.wait_step(job_id, 10)
    before = [present.pid for present in cluster.presents(job_id, 1)]
    drained = cluster.job(job_id).nodes[1]
    with cluster.client as client:
        client.drain(drained)
    cluster.wait_gone(before[2:])
    wait_for(lambda: cluster.job(job_id).attempt == 2, "the next attempt")
    slow_steps.speed_up()
    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert drained not in job.nodes
    after = [present.pid for present in cluster.presents(job_id, 2)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, incident.steps_redone) == ("node_drained", 0)
    assert cluster.losses(job_id) == fault_free
    with cluster.client as client:
        client.uncordon(drained)


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
