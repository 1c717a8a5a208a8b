"""Ids beyond the vocabulary that the look before the start has not seen: the job fails, once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.controller.processes import controller
from tests.e2e.cluster import Cluster

pytestmark = pytest.mark.timeout(300)

# Between the 256 samples of 4,096 tokens, which begin 17,631 tokens after each other.
COUNT, DISTANCE, BEHIND = 4_500_000, 17_631, (5000, 8000, 11_000, 14_000)


def test_a_job_that_comes_to_a_bad_id_fails_and_is_not_restarted(tmp_path: Path) -> None:
    tokens = (np.arange(COUNT) % 256).astype(np.int32)
    for behind in BEHIND:
        tokens[behind : COUNT - DISTANCE : DISTANCE] = 999
    np.save(tmp_path / "web.npy", tokens)
    nodes = ("--local-nodes", "2", "--workers-per-node", "1")
    with controller(tmp_path / "state", *nodes) as process:
        cluster = Cluster(tmp_path / "state", lambda: process.grpc)
        cluster.wait_nodes(2)
        job_id = cluster.submit(
            steps=2000,
            model={"vocab_size": 256},
            data={"tokens": str(tmp_path / "web.npy"), "max_bytes": None},
        )
        job = cluster.wait_state(job_id, "FAILED")
        # It had trained before.
        assert job.step > 0
        assert job.attempt == 1
        (incident,) = cluster.incidents(job_id)
        assert (incident.cause, incident.action) == ("config", "fail")
        assert "web.npy has the id 999 as token " in job.error + job.reason
        assert "beyond model.vocab_size = 256; allowed: 0 to 255" in job.error + job.reason
