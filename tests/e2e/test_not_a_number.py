"""Batches that give NaN or too large a loss, in real processes: left out, rolled back, or
the hardware's fault.

Tests choose at which step a rank's loss is NaN (`tests/chaos`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outlast.v1 import incidents_pb2
from tests.chaos.orders import Desk, Order
from tests.controller.processes import controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster
from tests.e2e.held import obeyed

pytestmark = pytest.mark.timeout(300)

STEPS = 60
EVERY_ATTEMPT = 0


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("orders"))


@contextmanager
def three_nodes(state_dir: Path, desk: Desk) -> Iterator[Cluster]:
    """Two nodes for the jobs, and one to spare: of so few, one in ten minutes may be replaced."""
    nodes = ("--local-nodes", "3", "--workers-per-node", "1", *QUICKLY_CHECKED)
    with obeyed(desk), controller(state_dir, *nodes) as process:
        cluster = Cluster(state_dir, lambda: process.grpc)
        cluster.wait_nodes(3)
        yield cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, desk: Desk) -> Iterator[Cluster]:
    with three_nodes(tmp_path_factory.mktemp("nan") / "state", desk) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def fault_free(cluster: Cluster, desk: Desk) -> dict[int, float]:
    desk.give(())
    job_id = cluster.submit(steps=STEPS)
    cluster.wait_state(job_id, "SUCCEEDED")
    return cluster.losses(job_id)


def order(act: str, step: int, *, attempt: int = EVERY_ATTEMPT, rank: int = 1) -> Order:
    return Order(
        name=f"{act}-{step}-{attempt}", at="step", act=act, rank=rank, attempt=attempt, step=step
    )


def bits(losses: dict[int, float]) -> dict[int, bytes]:
    return {step: struct.pack("<d", loss) for step, loss in losses.items()}


def between(losses: dict[int, float], first: int, last: int) -> dict[int, bytes]:
    return {step: raw for step, raw in bits(losses).items() if first <= step <= last}


def actions(incidents: tuple[incidents_pb2.Incident, ...]) -> list[str]:
    return [incident.action for incident in incidents]


def test_a_batch_that_reproduces_is_left_out_and_marked(
    cluster: Cluster, desk: Desk, fault_free: dict[int, float]
) -> None:
    bad = order("nan", 30)
    desk.give((bad,))
    job_id = cluster.submit(steps=STEPS)
    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert job.attempt == 3
    assert [(each.first, each.last) for each in job.skipped] == [(30, 30)]
    incidents = cluster.incidents(job_id)
    assert actions(incidents) == ["restart_in_place", "skip_batch"]
    assert {incident.cause for incident in incidents} == {"non_finite"}
    assert "step 30 was done again, and its loss is non-finite again" in incidents[1].reason

    with cluster.client as client:
        reports = {report.step: report for report in client.get(job_id, with_steps=True)[1]}
    assert sorted(reports) == list(range(1, STEPS + 1))
    assert [step for step, report in reports.items() if not report.tokens] == [30]
    losses = cluster.losses(job_id)
    assert [step for step, loss in losses.items() if math.isnan(loss)] == [30]
    assert between(losses, 1, 29) == between(fault_free, 1, 29)
    assert bits(losses)[31] != bits(fault_free)[31]

    # A run that is interrupted once more leaves out the same, and gives the same bits.
    desk.give((bad, order("kill", 45, attempt=3, rank=0)))
    again = cluster.submit(steps=STEPS)
    assert cluster.wait_state(again, "SUCCEEDED").attempt == 4
    assert bits(cluster.losses(again)) == bits(losses)


def test_a_rollback_undoes_steps_that_were_saved_already(
    cluster: Cluster, desk: Desk, fault_free: dict[int, float]
) -> None:
    desk.give((order("nan", 30),))
    job_id = cluster.submit(
        steps=STEPS,
        checkpoint={"storage_interval_steps": 10},
        detectors={"non_finite_again": "rollback", "rollback_steps": 12},
    )
    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert [(each.first, each.last) for each in job.skipped] == [(19, 30)]
    incidents = [each for each in cluster.incidents(job_id) if each.cause == "non_finite"]
    assert [each.action for each in incidents] == ["restart_in_place", "roll_back"]
    assert "going back to the weights after step 18" in incidents[1].reason
    # Host memory and the checkpoint of step 20 are of steps that were undone.
    assert incidents[1].resumed_step <= 10
    losses = cluster.losses(job_id)
    assert [step for step, loss in losses.items() if math.isnan(loss)] == list(range(19, 31))
    assert between(losses, 1, 18) == between(fault_free, 1, 18)
    assert sorted(losses) == list(range(1, STEPS + 1))


def test_a_spike_of_the_loss_is_rolled_back(cluster: Cluster, desk: Desk) -> None:
    """The stop stores a checkpoint of its own, and the one to go back to must stay."""
    desk.give((order("spike", 130),))
    # As of real jobs, few steps are trained before the ranks stop.
    desk.slow_down("steps")
    job_id = cluster.submit(
        steps=200,
        checkpoint={"storage_interval_steps": 20, "keep": 3},
        detectors={"spike": "act", "rollback_steps": 40},
    )
    job = cluster.wait_state(job_id, "SUCCEEDED")
    desk.speed_up()
    (left_out,) = job.skipped
    assert left_out.last >= 130
    assert left_out.first == max(1, left_out.last - 39)
    (incident,) = [each for each in cluster.incidents(job_id) if each.action]
    assert (incident.cause, incident.action) == ("spike", "roll_back")
    assert incident.reason.startswith("step 130: loss ")
    assert left_out.first - 20 <= incident.resumed_step + 1 <= left_out.first
    losses = cluster.losses(job_id)
    nothing = [step for step, loss in losses.items() if math.isnan(loss)]
    assert nothing == list(range(left_out.first, left_out.last + 1))
    assert sorted(losses) == list(range(1, 201))


def test_weights_that_give_no_number_fail_the_job(cluster: Cluster, desk: Desk) -> None:
    """No batch is at fault: three steps in a row are none."""
    desk.give(())
    job_id = cluster.submit(
        optimizer={"lr": 1e38, "clip_grad_norm": None}, recovery={"in_place_restarts": 20}
    )
    job = cluster.wait_state(job_id, "FAILED")
    assert "it is not the batch" in job.reason
    assert "NonFiniteLossError" in job.error
    assert len(job.skipped) == 2


def test_wrong_bits_in_the_step_that_is_done_again_name_the_node(
    tmp_path: Path, desk: Desk, fault_free: dict[int, float]
) -> None:
    """Its loss is finite again, and wrong in the last digits: another replica says so."""
    with three_nodes(tmp_path / "state", desk) as cluster:
        desk.give((order("nan", 30, attempt=1), order("wrong", 30, attempt=2)))
        job_id = cluster.submit(steps=STEPS)
        job = cluster.wait_state(job_id, "SUCCEEDED")
        first, second = cluster.incidents(job_id)
        losses = cluster.losses(job_id)
    assert job.attempt == 3
    assert first.action == "restart_in_place"
    assert (second.action, second.cause) == ("replace_nodes", "silent_corruption")
    assert list(second.culprit_nodes) == list(first.culprit_nodes)
    assert "done again by two replicas, and their bits differ" in second.reason
    assert bits(losses) == bits(fault_free)


def test_a_step_that_does_not_reproduce_is_a_nodes_and_the_second_one_replaces_it(
    cluster: Cluster, desk: Desk, fault_free: dict[int, float]
) -> None:
    desk.give((order("nan", 20, attempt=1), order("nan", 40, attempt=2)))
    job_id = cluster.submit(steps=STEPS)
    cluster.wait_state(job_id, "SUCCEEDED")
    first, second = cluster.incidents(job_id)
    assert first.action == "restart_in_place"
    (note,) = [entry.detail for entry in first.timeline if entry.phase == "replayed"]
    suspect = first.culprit_nodes[0]
    assert f"it did not reproduce, so a device computed wrong; {suspect} is suspected" in note
    assert (second.action, second.cause) == ("replace_nodes", "silent_corruption")
    assert list(second.culprit_nodes) == [suspect]
    assert len(second.node_checks) >= 2
    with cluster.client as client:
        nodes = {node.node_id: node for node in client.nodes()}
    assert nodes[suspect].state in ("QUARANTINED", "DRAINED")
    # Nothing was left out: the run is the fault-free one.
    assert bits(cluster.losses(job_id)) == bits(fault_free)
