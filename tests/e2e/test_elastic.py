"""A job whose node is lost for good goes on with fewer replicas, and with all when one joins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outlast.v1 import jobs_pb2
from tests.chaos.orders import Desk
from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICK_CHECKS, QUICKLY_CHECKED
from tests.e2e.cluster import DEADLINE_S, Cluster, wait_for
from tests.e2e.losing import lose_node

pytestmark = pytest.mark.timeout(600)

# Few steps that are slow: the job lasts as long as it takes two nodes to go and come.
INTERVAL = 6
STEPS = 160
STEP_S = 0.5
# Sums in another order differ in their last bits; in fp64 that stays small for so many steps.
CHANGES: dict[str, Any] = {"steps": STEPS, "precision": "fp64", "detectors": {"spike": "off"}}
ELASTIC = {"min_dp": 1, "after_s": 1, "grow_after_s": 1}


@pytest.fixture
def process(tmp_path: Path, desk: Desk) -> Iterator[Controller]:
    nodes = ("--local-nodes", "2", "--workers-per-node", "1", *QUICKLY_CHECKED)
    with controller(tmp_path / "state", *nodes) as it:
        yield it


@pytest.fixture
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(2)
    return cluster


@contextmanager
def joined(process: Controller, folder: Path) -> Iterator[None]:
    """One more node, which is started by hand."""
    command: list[Any] = [sys.executable, "-m", "controller.agent", "--node", "node-9"]
    command += ["--controller", process.grpc, "--workers", "1"]
    command += ["--state-dir", folder / "agent", "--memory-dir", folder / "memory"]
    command += ["--data-dir", process.state_dir / "data", *process.join_arguments]
    command += ["--suite-runner", QUICK_CHECKS]
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        agent.terminate()
        agent.wait(DEADLINE_S)


def log_of(cluster: Cluster, job_id: str, attempt: int) -> str:
    """What rank 0 of an attempt has printed."""
    (path,) = cluster.state_dir.glob(f"nodes/*/jobs/{job_id}/a{attempt}/rank-00000.log")
    return path.read_text()


def resumed_step(log: str) -> int:
    line = next(line for line in log.splitlines() if "training on after step" in line)
    return int(line.split("training on after step ")[1].split(",")[0])


@pytest.mark.parametrize(
    ("zero", "place", "source"),
    [
        # Every replica has the whole state, under whatever rank it goes on.
        pytest.param({"level": 0}, 0, "host memory", id="replicas"),
        pytest.param({"level": 1}, 1, "storage", id="shards"),
    ],
)
def test_job_shrinks_when_its_node_is_lost_and_grows_when_one_joins(
    cluster: Cluster,
    process: Controller,
    desk: Desk,
    tmp_path: Path,
    zero: dict[str, Any],
    place: int,
    source: str,
) -> None:
    changes = {**CHANGES, "parallel": {"zero": zero}}
    # The job must not end before all nodes are there.
    desk.slow_down("steps", step_s=STEP_S)
    job_id = cluster.submit(
        **changes,
        checkpoint={"storage_interval_steps": INTERVAL},
        recovery={"elastic": ELASTIC, "heal": True},
    )
    cluster.wait_step(job_id, INTERVAL + 4)
    # A node that is lost before would leave nothing in storage to go on from.
    wait_for(lambda: cluster.job(job_id).committed_step >= INTERVAL, "a committed checkpoint")
    job = cluster.job(job_id)
    assert job.ranks == 2
    survivor = cluster.presents(job_id, job.attempt)[1 - place].pid
    lose_node(process.state_dir, job.nodes[place])

    def runs_with(ranks: int) -> jobs_pb2.Job | None:
        job = cluster.job(job_id)
        assert job.state not in ("SUCCEEDED", "FAILED", "PAUSED"), f"{job.state}: {job.reason}"
        return job if job.state == "RUNNING" and job.ranks == ranks else None

    smaller = wait_for(lambda: runs_with(1), "the job to go on with one replica")
    assert "dp=1 on 1 node(s) instead of dp=2" in smaller.reason
    assert smaller.spec["parallel"]["dp"] == 2
    # Whatever its rank was: it goes on as the only one.
    assert [each.pid for each in cluster.presents(job_id, smaller.attempt)] == [survivor]
    log = log_of(cluster, job_id, smaller.attempt)
    assert f"from {source}" in log
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == "node_lost"
    assert "elastic" in [entry.phase for entry in incident.timeline]
    redone = incident.fault_step - resumed_step(log)
    assert redone <= (1 if source == "host memory" else 2 * INTERVAL)

    with joined(process, tmp_path):
        larger = wait_for(lambda: runs_with(2), "the job to go on with two replicas")
        assert "node-9" in larger.nodes
        assert cluster.presents(job_id, larger.attempt)[0].pid == survivor
        desk.speed_up()
        assert larger.retry_left == 10
        log = log_of(cluster, job_id, larger.attempt)
        # It stopped after a step, and that very step was stored.
        assert "from storage" in log
        stopped = max(steps_of(cluster, job_id, smaller.attempt))
        assert resumed_step(log) == stopped
        cluster.wait_state(job_id, "SUCCEEDED")
        causes = [(found.cause, found.reason) for found in cluster.incidents(job_id)]
        assert [cause for cause, _ in causes] == ["node_lost"], causes
        losses = cluster.losses(job_id)
        reference = cluster.submit(**changes)
        cluster.wait_state(reference, "SUCCEEDED")
        expected = cluster.losses(reference)
    assert list(losses) == list(expected) == list(range(1, STEPS + 1))
    assert list(losses.values()) == pytest.approx(list(expected.values()), rel=1e-6)


def steps_of(cluster: Cluster, job_id: str, attempt: int) -> list[int]:
    """Steps whose losses are those of an attempt."""
    with cluster.client as client:
        _, reports = client.get(job_id, with_steps=True)
    return [report.step for report in reports if report.attempt == attempt]
