"""With `recovery.heal`, the ranks that a fault leaves alive keep their processes; and when the
process that reads data for those of a node is killed, training does not feel it."""

from __future__ import annotations

import os
import re
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
# As many ranks: two stages with split backward passes, and in each two parts of every sequence.
IN_PARTS = {
    **JOB,
    "parallel": {
        "dp": 1,
        "cp": 2,
        "context": "ring",
        "pp": 2,
        "schedule": "zb-h1",
        "micro_batch": 2,
    },
}
# Two tensor-parallel ranks of one replica, on one node.
READING = {
    "parallel": {"dp": 1, "tp": 2, "micro_batch": 2},
    "resources": {"nodes": 1, "workers_per_node": 2},
}
_LOADER_STARTED = re.compile(r"data loader started: job=(\S+) attempt=1 pid=(\d+)")


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


def test_ranks_with_parts_of_sequences_heal_alike(
    cluster: Cluster, fault_free: dict[int, float], slowest_steps: Desk
) -> None:
    job_id = cluster.submit(**IN_PARTS, recovery={"heal": True}, name="in-parts")
    cluster.wait_step(job_id, 10)
    before = [present.pid for present in cluster.presents(job_id, 1)]
    os.kill(before[1], signal.SIGKILL)
    slowest_steps.speed_up()
    assert cluster.wait_state(job_id, "SUCCEEDED").attempt == 2
    after = [present.pid for present in cluster.presents(job_id, 2)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True, True]
    assert cluster.incidents(job_id)[0].steps_redone <= 1
    undisturbed = cluster.submit(**IN_PARTS, name="in-parts-alone")
    cluster.wait_state(undisturbed, "SUCCEEDED")
    assert cluster.losses(job_id) == cluster.losses(undisturbed)
    # And those of whole sequences, but for the order of fp32's sums.
    assert cluster.losses(job_id) == pytest.approx(fault_free, rel=1e-4)


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


def loaders(cluster: Cluster, job_id: str) -> list[int]:
    """The processes of all loaders of a job so far, as its agent's log names them."""
    logs = [path.read_text() for path in cluster.state_dir.glob("nodes/*/agent.log")]
    started = [found for log in logs for found in _LOADER_STARTED.findall(log)]
    return [int(pid) for job, pid in started if job == job_id]


def rank_log(cluster: Cluster, job_id: str) -> str:
    (path,) = cluster.state_dir.glob(f"nodes/*/jobs/{job_id}/a1/rank-00000.log")
    return path.read_text()


@pytest.mark.timeout(400)
def test_a_loader_that_is_killed_costs_no_step_and_no_rank(
    cluster: Cluster, slowest_steps: Desk
) -> None:
    job_id = cluster.submit(**READING, name="node", data={"loader": "node"})
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
    alone = cluster.submit(**READING, name="rank", data={"loader": "rank"})
    cluster.wait_state(alone, "SUCCEEDED")
    assert loaders(cluster, alone) == []
    losses = cluster.losses(job_id)
    assert len(losses) == 60
    assert losses == cluster.losses(alone)
