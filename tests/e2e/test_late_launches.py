"""A rank that gets little of its core: its node is the last to enter what the replicas share."""

from __future__ import annotations

from pathlib import Path

import pytest

from controller.trends.sampling import rank_steps
from diagnostics.core.launches import LaunchWindow, RankSteps
from outlast.layout import Layout
from tests.controller.processes import controller
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.throttled import throttled

LAYOUT = Layout(dp=2)
SAMPLES = 8


def sampled(cluster: Cluster, job_id: str) -> LaunchWindow:
    """What heartbeats say, as the controller samples it: each time of other steps."""
    with cluster.client as client:
        nodes = {rank.rank: rank.node for rank in client.ranks(job_id).ranks}
        window = LaunchWindow([range(2)], LAYOUT.dp_groups(), nodes)
        seen: list[dict[int, RankSteps]] = [{}]

        def is_of_other_steps() -> bool:
            ranks = client.ranks(job_id).ranks
            sample = {rank.rank: rank_steps(rank.split) for rank in ranks}
            if any(steps == seen[-1].get(rank) for rank, steps in sample.items()):
                return False
            seen.append(sample)
            window.add(sample)
            return True

        for _ in range(SAMPLES):
            wait_for(is_of_other_steps, "ranks to speak of other steps")
    return window


def test_a_starved_rank_enters_last_and_its_node_is_named(tmp_path: Path) -> None:
    options = ("--local-nodes", "2", "--workers-per-node", "1")
    with controller(tmp_path / "state", *options) as running:
        cluster = Cluster(running.state_dir, lambda: running.grpc)
        cluster.wait_nodes(2)
        job_id = cluster.submit(
            steps=100_000,
            detectors={"hang": "log"},
            recovery={"heartbeat_period_s": 0.5, "preflight": False},
        )
        cluster.wait_state(job_id, "RUNNING")
        cluster.wait_step(job_id, 20)
        pid = cluster.presents(job_id, cluster.job(job_id).attempt)[1].pid
        node = cluster.job(job_id).nodes[1]
        with throttled(pid, runs_s=0.01, stands_s=0.03):

            def is_last() -> LaunchWindow | None:
                window = sampled(cluster, job_id)
                return window if window.nodes()[node].last_ratio > 0.8 else None

            window = wait_for(is_last, "its node to be the last to enter")
        launches = window.launches()
        assert launches is not None
        # Of two, one waits: half of the spread is lost.
        assert launches.late_s == pytest.approx(launches.spread_s / 2, rel=0.01)
        assert launches.spread_s > 0.1 * launches.step_s
        work = window.nodes()[node]
        assert (work.is_slowest, work.expected_ratio) == (True, 0.5)
