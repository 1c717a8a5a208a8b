"""Scripts with `workload.min_nodes`: on the node that is left, and on both when one joins."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from outlast.v1 import jobs_pb2
from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICK_CHECKS, QUICKLY_CHECKED, HandNodes, hand_nodes
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.losing import lose_node
from tests.e2e.script_jobs import EXAMPLES, RAISING, STEP_LINE, submit

pytestmark = pytest.mark.timeout(300)

# More than any run here does: the job is cancelled when it has done what it was to do.
STEPS = ("--steps", "1000000", "--hidden", "256")
INTERVAL = 20
PACED = ("python", str(RAISING.with_name("pacing.py")), "0.05")


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Controller]:
    nodes = ("--local-nodes", "2", "--workers-per-node", "1", *QUICKLY_CHECKED)
    with controller(tmp_path / "state", *nodes) as it:
        yield it


@pytest.fixture
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(2)
    return cluster


@pytest.fixture
def others(process: Controller, tmp_path: Path) -> Iterator[HandNodes]:
    with hand_nodes(process, tmp_path / "others", checks=QUICK_CHECKS) as nodes:
        yield nodes


def elastic(cluster: Cluster, *command: str, heal: bool = False, **more: Any) -> str:
    return submit(
        cluster,
        *command,
        workload={"min_nodes": 1, "max_nodes": 2},
        recovery={"elastic": {"after_s": 1, "grow_after_s": 2}, "heal": heal},
        **more,
    )


def runs_on(cluster: Cluster, job_id: str, ranks: int) -> jobs_pb2.Job:
    def it() -> jobs_pb2.Job | None:
        job = cluster.job(job_id)
        assert job.state not in ("SUCCEEDED", "FAILED", "PAUSED"), f"{job.state}: {job.reason}"
        return job if job.state == "RUNNING" and job.ranks == ranks else None

    return wait_for(it, f"the script to run on {ranks} rank(s)")


def steps_of(cluster: Cluster, job_id: str, attempt: int) -> list[int]:
    """What rank 0 of an attempt has printed."""
    (path,) = cluster.state_dir.parent.glob(f"**/{job_id}/a{attempt}/rank-00000.log")
    return [int(step) for step, _ in STEP_LINE.findall(path.read_text())]


def test_a_script_that_saves_by_itself_goes_on_with_the_nodes_there_are(
    cluster: Cluster, process: Controller, others: HandNodes, tmp_path: Path
) -> None:
    saved = ["--save-every", f"{INTERVAL}", "--checkpoint", str(tmp_path / "ddp.pt")]
    job_id = elastic(cluster, *PACED, str(EXAMPLES / "ddp.py"), *STEPS, *saved)
    before = runs_on(cluster, job_id, 2)
    wait_for(lambda: max(steps_of(cluster, job_id, 1), default=0) > INTERVAL, "a saved step")
    lose_node(process.state_dir, before.nodes[1])
    smaller = runs_on(cluster, job_id, 1)
    assert "with 1 node(s) instead of 2 node(s) (workload.min_nodes)" in smaller.reason
    wait_for(lambda: steps_of(cluster, job_id, smaller.attempt), "it to go on")
    others.start("node-9")
    larger = runs_on(cluster, job_id, 2)
    assert "node-9" in larger.nodes
    assert larger.retry_left == smaller.retry_left
    wait_for(lambda: steps_of(cluster, job_id, larger.attempt), "it to go on")
    attempts = [steps_of(cluster, job_id, attempt) for attempt in range(1, larger.attempt + 1)]
    for earlier, later in pairwise(attempts):
        # Each goes on from what the last had saved.
        assert later[0] % INTERVAL == 1
        assert later[0] <= earlier[-1] + 1 < later[0] + INTERVAL + 1
    _cancel(cluster, job_id)


@pytest.mark.parametrize("heal", [False, True], ids=["session", "healing"])
def test_a_script_with_a_session_grows_after_a_step_that_all_have_done(
    cluster: Cluster, process: Controller, others: HandNodes, heal: bool
) -> None:
    script = str(EXAMPLES / f"ddp_{'healing' if heal else 'session'}.py")
    stored = {"storage_interval_steps": INTERVAL}
    job_id = elastic(cluster, *PACED, script, *STEPS, checkpoint=stored, heal=heal)
    before = runs_on(cluster, job_id, 2)
    wait_for(lambda: cluster.job(job_id).committed_step >= INTERVAL, "a checkpoint in storage")
    lose_node(process.state_dir, before.nodes[1])
    smaller = runs_on(cluster, job_id, 1)
    others.start("node-9")
    larger = runs_on(cluster, job_id, 2)
    wait_for(lambda: steps_of(cluster, job_id, larger.attempt), "it to go on")
    done = steps_of(cluster, job_id, smaller.attempt)
    assert steps_of(cluster, job_id, larger.attempt)[0] == done[-1] + 1
    pids = {cluster.presents(job_id, each.attempt)[0].pid for each in (before, smaller, larger)}
    assert (len(pids) == 1) is heal
    _cancel(cluster, job_id)


def _cancel(cluster: Cluster, job_id: str) -> None:
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")
