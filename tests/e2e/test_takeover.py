"""A second controller that waits for the first one's end, with real nodes and a job that trains."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.chaos.orders import Desk
from tests.controller.processes import Controller, controller, refusal
from tests.e2e.cluster import Cluster, wait_for

NODES = ("--local-nodes", "2", "--workers-per-node", "1")


def test_second_controller_takes_over_and_training_notices_nothing(
    tmp_path: Path, slowest_steps: Desk
) -> None:
    with controller(tmp_path / "state", *NODES) as first:
        second = Controller(first.state_dir, *NODES, "--wait")
        cluster = Cluster(first.state_dir, lambda: str(first.file()["grpc"]))
        cluster.wait_nodes(2)
        job_id = cluster.submit()
        cluster.wait_step(job_id, 5)
        pids = [present.pid for present in cluster.presents(job_id, 1)]
        starting = threading.Thread(target=second.start)
        starting.start()
        try:
            wait_for(lambda: "controller waits: " in first.stderr.read_text(), "it to wait")
            first.kill()
            starting.join()
            cluster.wait_nodes(2)
            assert cluster.wait_state(job_id, "RUNNING").attempt == 1
            assert [present.pid for present in cluster.presents(job_id, 1)] == pids
            slowest_steps.speed_up()
            job = cluster.wait_state(job_id, "SUCCEEDED")
            assert (job.attempt, job.restarts) == (1, 0)
            assert not cluster.incidents(job_id)
            undisturbed = cluster.submit()
            cluster.wait_state(undisturbed, "SUCCEEDED")
            losses = cluster.losses(job_id)
            assert list(losses) == list(range(1, 61))
            assert losses == cluster.losses(undisturbed)
        finally:
            starting.join()
            second.stop()


def test_controller_that_waits_can_be_stopped(tmp_path: Path) -> None:
    with controller(tmp_path / "state") as first:
        second = Controller(first.state_dir, "--wait")
        stopping = threading.Thread(target=stop_once_it_waits, args=(first, second))
        stopping.start()
        with pytest.raises(AssertionError, match="the controller ended"):
            second.start()
        stopping.join()
        assert second.process is not None
        assert second.process.wait() == 0
        assert first.file()["pid"] == first.pid


def test_what_is_taken_over_is_not_forgotten(tmp_path: Path) -> None:
    assert "--fresh forgets" in refusal(tmp_path / "state", "--wait", "--fresh")


def stop_once_it_waits(first: Controller, second: Controller) -> None:
    wait_for(lambda: "controller waits: " in first.stderr.read_text(), "it to wait")
    assert second.process is not None
    second.process.terminate()
