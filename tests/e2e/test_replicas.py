"""A node is lost with its memory: training goes on from other nodes' memory, not from storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.orders import Desk
from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.losing import lose_node, memory_folder

pytestmark = pytest.mark.timeout(400)

# Nothing gets into storage before the end: whoever goes on has it from memory.
NO_STORAGE = {"storage_interval_steps": 1000, "replicas": 1}
STEPS = 100
# Until a node is lost, so that the job cannot end first.
STEP_S = 0.2
# Each rank is a stage of its own, whose state nobody else holds.
STAGES = {"pp": 2, "dp": 1, "micro_batch": 2}
MODEL = {"layers": 2, "hidden": 32, "heads": 2, "seq_len": 32}


# Two for a job, and those that the tests lose, in whatever order they come.
NODES = 7


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, lasting_desk: Desk) -> Iterator[Controller]:
    nodes = ("--local-nodes", str(NODES), "--workers-per-node", "1", *QUICKLY_CHECKED)
    with controller(tmp_path_factory.mktemp("replicas") / "state", *nodes) as it:
        yield it


@pytest.fixture(scope="module")
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(NODES)
    return cluster


def losses_without_a_fault(cluster: Cluster, **changes: Any) -> dict[int, float]:
    job_id = cluster.submit(**{**changes, "checkpoint": {"storage_interval_steps": 1000}})
    cluster.wait_state(job_id, "SUCCEEDED")
    return cluster.losses(job_id)


def logs(cluster: Cluster, job_id: str, attempt: int) -> list[str]:
    folder = cluster.state_dir / "nodes"
    return [path.read_text() for path in folder.glob(f"*/jobs/{job_id}/a{attempt}/rank-*.log")]


def commits(cluster: Cluster, job_id: str) -> list[Path]:
    return list((cluster.state_dir / "checkpoints" / job_id / "commits").glob("*.json"))


@pytest.mark.parametrize(
    ("parallel", "place"),
    [
        pytest.param(STAGES, 0, id="stages"),
        pytest.param({"dp": 2, "micro_batch": 2, "zero": {"level": 1}}, 1, id="zero"),
        pytest.param({"dp": 2, "micro_batch": 2}, 1, id="twin"),
    ],
)
def test_job_that_loses_a_node_and_its_memory_goes_on_from_the_other_ones_memory(
    cluster: Cluster, process: Controller, lasting_desk: Desk, parallel: dict[str, Any], place: int
) -> None:
    changes = {"steps": STEPS, "model": MODEL, "parallel": parallel}
    lasting_desk.slow_down("steps", step_s=STEP_S)
    job_id = cluster.submit(**changes, checkpoint=NO_STORAGE)
    cluster.wait_step(job_id, 10)
    lost = cluster.job(job_id).nodes[place]
    assert not commits(cluster, job_id)
    lose_node(process.state_dir, lost)
    lasting_desk.speed_up()

    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert job.attempt == 2
    assert lost not in job.nodes
    found = logs(cluster, job_id, 2)
    assert len(found) == 2
    assert all("from host memory" in text for text in found), found
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == "node_lost"
    assert cluster.losses(job_id) == losses_without_a_fault(cluster, **changes)


def test_copies_are_gone_from_memory_when_the_job_has_ended(
    cluster: Cluster, process: Controller
) -> None:
    job_id = cluster.submit(steps=100, model=MODEL, parallel=STAGES, checkpoint=NO_STORAGE)
    memory = memory_folder(process.state_dir)
    wait_for(lambda: list(memory.glob(f"*/{job_id}")), "the job to be in host memory")
    cluster.wait_state(job_id, "SUCCEEDED")
    wait_for(lambda: not list(memory.glob(f"*/{job_id}")), "host memory to be freed")


def test_losing_a_node_together_with_the_holder_of_its_copies_goes_back_to_storage(
    cluster: Cluster, process: Controller, lasting_desk: Desk
) -> None:
    changes = {"steps": STEPS, "model": MODEL, "parallel": STAGES}
    lasting_desk.slow_down("steps", step_s=STEP_S)
    job_id = cluster.submit(**changes, checkpoint={"storage_interval_steps": 5, "replicas": 1})
    wait_for(lambda: commits(cluster, job_id), "a checkpoint in storage")
    cluster.wait_step(job_id, 12)
    for node in list(cluster.job(job_id).nodes):
        lose_node(process.state_dir, node)
    lasting_desk.speed_up()
    cluster.wait_state(job_id, "SUCCEEDED")
    job = cluster.job(job_id)
    found = logs(cluster, job_id, job.attempt)
    assert all("from storage" in text for text in found), found
    assert any(
        "no state in memory anywhere" in item.detail
        for incident in cluster.incidents(job_id)
        for item in incident.evidence
    )
    assert cluster.losses(job_id) == losses_without_a_fault(cluster, **changes)
