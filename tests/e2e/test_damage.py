"""The only committed checkpoint is damaged and host memory is gone, in real processes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.orders import Desk
from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICK_CHECKS, hand_nodes
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.held import HELD, STEPS, UPLOADED, held_in_first_attempt

pytestmark = pytest.mark.timeout(300)
NODES = ("node-a", "node-b")


@pytest.fixture
def process(tmp_path: Path, desk: Desk) -> Iterator[Controller]:
    with controller(tmp_path / "state") as it:
        yield it


def flip(path: Path) -> None:
    """Change the last byte of a file, or change it back."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_job_is_paused_with_the_file_named_and_resumes_when_it_is_whole_again(
    process: Controller, desk: Desk, tmp_path: Path
) -> None:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    with hand_nodes(process, tmp_path, *NODES, checks=QUICK_CHECKS) as nodes:
        cluster.wait_nodes(2)
        held_in_first_attempt(desk)
        job_id = cluster.submit(**HELD)
        wait_for(lambda: cluster.job(job_id).HasField("committed_step"), "a committed checkpoint")
        assert cluster.job(job_id).committed_step == UPLOADED
        for node in NODES:
            nodes.stop(node)
            shutil.rmtree(tmp_path / node / "memory")
        store = process.state_dir / "checkpoints" / job_id
        damaged = max(store.glob("step-*/*.distcp"), key=lambda path: path.stat().st_size)
        flip(damaged)
        for node in NODES:
            nodes.start(node)
        job = cluster.wait_state(job_id, "PAUSED")
        # One try, and nothing is moved: it may be repaired.
        assert job.attempt == 2
        assert f"{store.as_uri()} has no checkpoint that can be loaded" in job.reason
        assert damaged.name in job.reason
        assert "do not fit their checksum" in job.reason
        (incident,) = cluster.incidents(job_id)
        assert (incident.cause, incident.action) == ("checkpoint", "pause")
        assert not incident.culprit_nodes
        flip(damaged)
        with cluster.client as client:
            client.resume(job_id)
        assert cluster.wait_state(job_id, "SUCCEEDED").attempt == 3
        assert list(cluster.losses(job_id)) == list(range(1, STEPS + 1))
