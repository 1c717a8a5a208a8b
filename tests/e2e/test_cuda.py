"""One real GPU under a real job; test_faults.py covers the same path on CPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.controller.processes import controller
from tests.e2e.cluster import Cluster

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device; test_job_that_loses_a_worker_has_the_same_losses runs on CPUs",
    ),
]


def test_job_on_a_gpu_that_loses_its_worker_has_the_same_losses(tmp_path: Path) -> None:
    with controller(tmp_path / "state", "--local-nodes", "1", "--workers-per-node", "1") as process:
        cluster = Cluster(process.state_dir, lambda: process.grpc)
        cluster.wait_nodes(1)
        changes = {
            "steps": 200,
            "model": {"layers": 4, "hidden": 256, "heads": 4, "seq_len": 128},
            "parallel": {"dp": 1, "micro_batch": 4},
            "resources": {"workers_per_node": 1, "device": "cuda"},
        }
        fault_free = cluster.submit(**changes)
        cluster.wait_state(fault_free, "SUCCEEDED")
        job_id = cluster.submit(**changes)
        cluster.wait_step(job_id, 40)
        cluster.kill_rank(job_id, attempt=1, rank=0)
        job = cluster.wait_state(job_id, "SUCCEEDED")
        assert job.attempt == 2
        (incident,) = cluster.incidents(job_id)
        assert (incident.cause, incident.action) == ("worker_killed", "restart_in_place")
        assert incident.steps_redone <= 1
        assert cluster.losses(job_id) == cluster.losses(fault_free)
        print(*(entry.detail for entry in incident.timeline), sep="\n")
