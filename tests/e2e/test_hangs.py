"""Jobs that stand still, in real processes: found in seconds, and explained."""

from __future__ import annotations

import json
import math
import os
import signal
import time

import pytest

from controller.trends.sampling import rank_steps
from diagnostics.core.launches import LaunchWindow, RankSteps
from outlast.layout import Layout
from tests.cli.running import outlast
from tests.controller.processes import Controller, node_pids
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.throttled import throttled

pytestmark = pytest.mark.timeout(300)

PAUSE_S = 5.0
LAYOUT = Layout(dp=2)
SAMPLES = 8


@pytest.mark.usefixtures("slow_steps")
def test_a_stopped_rank_is_named_with_the_stacks_of_all(
    cluster: Cluster, process: Controller
) -> None:
    job_id = cluster.submit(name="stopped", steps=100_000)
    cluster.wait_step(job_id, 30)
    with cluster.client as client:
        standing = {each.rank: each for each in client.stacks(job_id)}
    assert "TrainLoop.train_step" in standing[0].text
    where = ("--state-dir", str(process.state_dir))
    brief = outlast("stacks", job_id, "--brief", *where).stdout.splitlines()
    assert [line.split()[:2] for line in brief[1:]] == [["0", "node-0"], ["1", "node-1"]]
    assert "train_step" in outlast("stacks", job_id, "--rank", "1", *where).stdout
    file = process.state_dir / "ranks.speedscope.json"
    both = ("--rank", "1", "--rank", "0", "--seconds", "1")
    profile = outlast("profile", job_id, *both, "--output", str(file), *where)
    assert profile.stdout.split()[:5] == ["RANK", "1", "RANK", "0", "FUNCTION"]
    threads = json.loads(file.read_text())["profiles"]
    assert threads[0]["name"].startswith("rank 1: Thread")
    assert cluster.job(job_id).attempt == 1
    stopped = cluster.presents(job_id, 1)[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    wait_for(lambda: cluster.job(job_id).attempt == 2, "the next attempt")
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == "hang"
    assert "rank 1 stopped by a signal" in incident.reason
    signs = {(item.kind, item.rank): item for item in incident.evidence if item.HasField("rank")}
    assert "stopped by a signal" in signs["stacks", 1].detail
    assert "train_step" in signs["stacks", 1].traceback
    # Rank 0 waits for it, and may have lost its connection before its own agent came to look.
    assert ("stacks", 0) in signs or ("worker_exit", 0) in signs
    assert any(entry.phase == "last_operations" for entry in incident.timeline)
    cluster.wait_step(job_id, stopped.completed_step + 5)
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")


def test_a_pause_of_the_whole_machine_is_no_fault(cluster: Cluster, process: Controller) -> None:
    job_id = cluster.submit(name="paused", steps=100_000, eval={"interval_steps": 40})
    cluster.wait_step(job_id, 100)
    pids = [
        process.pid,
        *node_pids(process.state_dir).values(),
        *(p.pid for p in cluster.presents(job_id, 1)),
    ]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        # Twice what makes a rank stand for too long, and a node late.
        time.sleep(PAUSE_S if number is signal.SIGSTOP else 0)
    reached = cluster.job(job_id).step
    cluster.wait_step(job_id, reached + 40)
    job = cluster.job(job_id)
    assert (job.state, job.attempt) == ("RUNNING", 1)
    assert not cluster.incidents(job_id)
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")


def test_a_loss_that_is_no_number_is_replayed_and_checked_before_the_job_fails(
    cluster: Cluster,
) -> None:
    job_id = cluster.submit(
        name="diverges",
        optimizer={"lr": 1e38, "clip_grad_norm": None},
        detectors={"non_finite_again": "fail"},
    )
    job = cluster.wait_state(job_id, "FAILED")
    assert "NonFiniteLossError" in job.error
    incidents = cluster.incidents(job_id)
    assert [item.cause for item in incidents] == ["non_finite"] * len(incidents)
    assert [item.action for item in incidents][-1] == "fail"
    assert incidents[0].action == "restart_in_place"


def diverge(cluster: Cluster, mode: str) -> str:
    """Train to the end on NaN losses, with `detectors.non_finite` in this mode."""
    job_id = cluster.submit(
        name=f"diverges-{mode}",
        optimizer={"lr": 1e38, "clip_grad_norm": None},
        detectors={"non_finite": mode},
    )
    assert cluster.wait_state(job_id, "SUCCEEDED").attempt == 1
    return job_id


def test_a_loss_that_is_no_number_may_be_left_out(cluster: Cluster) -> None:
    job_id = diverge(cluster, "log")
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, incident.state) == ("non_finite", "CLOSED")
    assert "the step's update was left out" in incident.reason


def test_a_loss_that_is_no_number_may_be_trained_on(cluster: Cluster) -> None:
    job_id = diverge(cluster, "off")
    assert not cluster.incidents(job_id)
    assert any(math.isnan(loss) for loss in cluster.losses(job_id).values())


def test_a_rank_that_is_starved_of_cpu_is_named_and_left_running(cluster: Cluster) -> None:
    # Steps longer than a pause, so that each has its share of them.
    model = {"hidden": 128, "seq_len": 256}
    job_id = cluster.submit(name="starved", steps=100_000, model=model)
    cluster.wait_step(job_id, 10)
    with throttled(cluster.presents(job_id, 1)[1].pid):
        (incident,) = wait_for(lambda: cluster.incidents(job_id), "the straggler to be told")
    assert (incident.cause, incident.state) == ("straggler", "OPEN")
    assert incident.evidence[0].rank == 1
    assert "times the" in incident.reason
    assert cluster.job(job_id).attempt == 1
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")


@pytest.mark.usefixtures("slow_steps")
def test_what_a_running_worker_writes_of_its_gpu_is_an_incident_beside_training(
    cluster: Cluster,
) -> None:
    job_id = cluster.submit(name="lines", steps=100_000)
    cluster.wait_step(job_id, 5)
    (log,) = cluster.state_dir.glob(f"nodes/*/jobs/{job_id}/a1/rank-00001.log")
    with log.open("a") as lines:
        print("RuntimeError: CUDA error: uncorrectable ECC error encountered", file=lines)
    wait_for(lambda: cluster.incidents(job_id), "an incident")
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == "worker_log"
    assert incident.evidence[0].node == cluster.job(job_id).nodes[1]
    assert "rank 1: a GPU's memory" in incident.evidence[0].detail
    reached = cluster.job(job_id).step
    cluster.wait_step(job_id, reached + 20)
    assert cluster.job(job_id).attempt == 1
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")


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


def test_a_starved_rank_enters_last_and_its_node_is_named(cluster: Cluster) -> None:
    """It gets little of its core: its node is the last to enter what the replicas share."""
    job_id = cluster.submit(
        name="late",
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
            work, launches = window.nodes()[node], window.launches()
            # On a busy machine steps are so long that it is late by little of one.
            is_plain = launches is not None and launches.spread_s > 0.1 * launches.step_s
            return window if is_plain and work.is_slowest and work.last_ratio > 0.8 else None

        window = wait_for(is_last, "its node to be the last to enter")
    launches = window.launches()
    assert launches is not None
    # Of two, one waits: half of the spread is lost.
    assert launches.late_s == pytest.approx(launches.spread_s / 2, rel=0.01)
    assert window.nodes()[node].expected_ratio == 0.5
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")
