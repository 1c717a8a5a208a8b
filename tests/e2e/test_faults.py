"""Real processes, real faults: the job ends as it would have without them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from controller.local.processes import members_of
from tests.chaos.orders import Desk
from tests.controller.processes import Controller, node_pids
from tests.e2e.cluster import DEADLINE_S, Cluster, wait_for
from tests.e2e.losing import lose_node

pytestmark = pytest.mark.timeout(400)


def test_job_that_loses_a_worker_has_the_same_losses(
    cluster: Cluster, fault_free: dict[int, float], slowest_steps: Desk
) -> None:
    job_id = cluster.train_with_a_killed_worker(slowest_steps.speed_up)
    assert cluster.losses(job_id) == fault_free


@pytest.mark.usefixtures("slow_steps")
def test_jobs_that_a_failed_test_would_leave_are_reported_and_cancelled(cluster: Cluster) -> None:
    job_id = cluster.submit(steps=100_000)
    cluster.wait_step(job_id, 1)
    cluster.kill_rank(job_id, attempt=1, rank=1)
    wait_for(lambda: cluster.incidents(job_id), "the fault to be noticed")
    report = cluster.clear()
    assert f"{job_id}: " in report
    assert " worker_killed: " in report
    assert cluster.job(job_id).state == "CANCELLED"


@pytest.mark.usefixtures("slow_steps")
def test_controller_killed_and_restarted_leaves_training_alone(
    cluster: Cluster, process: Controller, fault_free: dict[int, float]
) -> None:
    job_id = cluster.submit(steps=100_000)
    cluster.wait_step(job_id, 20)
    pids = [present.pid for present in cluster.presents(job_id, 1)]
    process.kill()
    before = min(present.completed_step for present in cluster.presents(job_id, 1))
    wait_for(
        lambda: min(present.completed_step for present in cluster.presents(job_id, 1)) > before + 5,
        "training to go on without a controller",
    )
    process.start()
    cluster.wait_nodes(2)
    job = cluster.wait_state(job_id, "RUNNING")
    assert job.attempt == 1
    assert [present.pid for present in cluster.presents(job_id, 1)] == pids
    reached = job.step
    cluster.wait_step(job_id, reached + 5)
    losses = cluster.losses(job_id)
    # Nothing that was reported while the controller was away is missing.
    assert list(losses) == list(range(1, max(losses) + 1))
    assert not cluster.incidents(job_id)
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")


def test_nodes_and_their_link_are_checked_between_a_fault_and_the_restart(
    cluster: Cluster, slowest_steps: Desk
) -> None:
    job_id = cluster.submit(name="searched", recovery={"in_place_restarts": 0})
    cluster.wait_step(job_id, 5)
    cluster.kill_rank(job_id, 1, 1)
    slowest_steps.speed_up()
    cluster.wait_state(job_id, "SUCCEEDED")
    (incident,) = cluster.incidents(job_id)
    # A busy machine may leave a check inconclusive; nothing is broken here.
    assert len(incident.node_checks) == 2
    assert "fail" not in [check.verdict for check in incident.node_checks]
    assert incident.action == "restart_in_place"
    assert "checks found nothing" in incident.reason
    with cluster.client as client:
        run = client.diagnostic_run(incident.diagnostic_run)
    assert (run.state, run.origin, run.suite) == ("done", incident.incident_id, "on-failure")
    assert len(run.links) >= 1
    # The job's own checkpoint path was probed.
    assert "storage" in [finding.test for finding in run.findings if finding.metric]


def test_a_new_job_goes_on_from_another_ones_checkpoint_with_fewer_nodes(cluster: Cluster) -> None:
    first = cluster.submit(steps=20)
    cluster.wait_state(first, "SUCCEEDED")
    folder = cluster.state_dir / "checkpoints" / first
    # A job may succeed before its last upload has.
    wait_for((folder / "commits" / "00000020.json").exists, "the last checkpoint to be committed")
    load = {"load": f"file://{folder}", "load_step": 20}
    second = cluster.submit(steps=30, parallel={"dp": 1}, checkpoint=load)
    job = cluster.wait_state(second, "SUCCEEDED")
    assert list(cluster.losses(second)) == list(range(21, 31))
    assert not cluster.incidents(second)
    assert any("parallel.dp 2 is now 1" in line for line in job.environment_changes)


def test_user_error_before_the_first_step_fails_the_job_at_once(cluster: Cluster) -> None:
    first = cluster.submit(steps=20)
    cluster.wait_state(first, "SUCCEEDED")
    folder = cluster.state_dir / "checkpoints" / first
    wait_for((folder / "commits" / "00000020.json").exists, "the last checkpoint to be committed")
    load = {"load": folder.as_uri(), "storage_interval_steps": 10}
    # Only a rank that loads it can see that it was trained on samples in another order.
    job_id = cluster.submit(steps=30, seed=4711, checkpoint=load)
    job = cluster.wait_state(job_id, "FAILED")
    assert job.attempt == 1
    assert "before the first step" in job.reason
    assert "rule" not in job.reason
    assert "was trained on other samples" in job.error
    assert "Traceback" in job.error


def test_a_source_that_is_on_no_node_fails_the_job_before_any_rank_starts(
    cluster: Cluster,
) -> None:
    job_id = cluster.submit(data={"source": "/no/such/text"})
    job = cluster.wait_state(job_id, "FAILED")
    assert job.attempt == 1
    assert "data.source" in job.reason
    assert "/no/such/text" in job.error
    assert "Traceback" not in job.error
    assert cluster.presents(job_id, 1) == []


# Between the 256 samples of 4,096 tokens, which begin 66,650 tokens after each other.
COUNT, DISTANCE, BEHIND = 17_000_000, 66_650, (5000, 40_000)


def test_a_job_that_comes_to_a_bad_id_fails_and_is_not_restarted(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The look before the start has not seen the ids beyond the vocabulary."""
    tokens = (np.arange(COUNT) % 256).astype(np.int32)
    for behind in BEHIND:
        tokens[behind : COUNT - DISTANCE : DISTANCE] = 999
    np.save(tmp_path / "web.npy", tokens)
    job_id = cluster.submit(
        steps=2000,
        model={"vocab_size": 256},
        # One of so many ids at a URL is not read whole before a start.
        data={
            "tokens": f"file://{tmp_path}/web.npy",
            "check_ids": "sampled",
            "max_bytes": None,
        },
    )
    job = cluster.wait_state(job_id, "FAILED")
    # It had trained before.
    assert job.step > 0
    assert job.attempt == 1
    # Steps of other ids may be told of as well: of a spike, say.
    *_, incident = cluster.incidents(job_id)
    assert (incident.cause, incident.action) == ("config", "fail")
    assert "web.npy has the id 999 as token " in job.error + job.reason
    assert "beyond model.vocab_size = 256; allowed: 0 to 255" in job.error + job.reason


@pytest.mark.usefixtures("slow_steps")
def test_text_that_changes_under_a_job_fails_it_instead_of_being_mixed_in(
    cluster: Cluster, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("to be or not to be " * 2000)
    job_id = cluster.submit(steps=100_000, data={"source": str(text)})
    cluster.wait_step(job_id, 10)
    with text.open("a") as file:
        file.write("that is the question " * 500)
    cluster.kill_rank(job_id, attempt=1, rank=1)
    job = cluster.wait_state(job_id, "FAILED")
    assert "its text has changed since the checkpoint" in job.error


def test_unwritable_checkpoint_url_is_found_before_training(cluster: Cluster) -> None:
    job_id = cluster.submit(checkpoint={"url": "file:///proc/outlast"})
    job = cluster.wait_state(job_id, "FAILED")
    assert "/proc/outlast" in job.reason
    assert job.attempt == 1
    assert job.step == 0
    # Nodes without rank 0 may have forked already; nobody got past the rendezvous.
    assert all(present.resumed_step == -1 for present in cluster.presents(job_id, 1))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB: less than one checkpoint."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_stops_no_training_and_is_an_incident(
    cluster: Cluster, small_disk: Path, fault_free: dict[int, float]
) -> None:
    job_id = cluster.submit(checkpoint={"url": f"file://{small_disk}", "last_timeout_s": 3})
    job = cluster.wait_state(job_id, "PAUSED")
    # Every step was trained; only its checkpoint is missing.
    assert cluster.losses(job_id) == fault_free
    assert not job.HasField("committed_step")
    incidents = cluster.incidents(job_id)
    assert {incident.cause for incident in incidents} == {"storage"}
    assert "No space left" in incidents[0].reason
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")


def test_last_checkpoint_that_does_not_fit_is_pushed_once_there_is_room(
    cluster: Cluster, small_disk: Path
) -> None:
    job_id = cluster.submit(
        checkpoint={
            "url": f"file://{small_disk}",
            "storage_interval_steps": 1000,
            "last_timeout_s": 3,
        }
    )
    job = cluster.wait_state(job_id, "PAUSED")
    assert "the last checkpoint is not in" in job.reason
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    with cluster.client as client:
        client.push_checkpoint(job_id)
    job = cluster.wait_state(job_id, "SUCCEEDED")
    assert job.committed_step == job.total_steps
    wait_for(
        lambda: {incident.state for incident in cluster.incidents(job_id)} == {"CLOSED"},
        "the incidents of storage to be closed",
    )
    assert {incident.cause for incident in cluster.incidents(job_id)} == {"storage"}


def test_pause_and_resume_go_on_from_host_memory(
    cluster: Cluster, fault_free: dict[int, float], slowest_steps: Desk
) -> None:
    job_id = cluster.submit()
    cluster.wait_step(job_id, 5)
    with cluster.client as client:
        client.pause(job_id)
    cluster.wait_state(job_id, "PAUSED")
    slowest_steps.speed_up()
    with cluster.client as client:
        client.resume(job_id)
    cluster.wait_state(job_id, "SUCCEEDED")
    assert cluster.losses(job_id) == fault_free


@pytest.mark.usefixtures("slow_steps")
def test_interrupt_stops_everything_and_the_next_start_resumes(
    cluster: Cluster, process: Controller
) -> None:
    job_id = cluster.submit(steps=100_000)
    cluster.wait_step(job_id, 30)
    sessions = list(node_pids(process.state_dir).values())
    assert members_of(sessions)
    code, seconds = process.stop(signal.SIGINT)
    assert (code, seconds < 20) == (0, True)
    assert not members_of(sessions)
    process.start()
    wait_for(
        lambda: (job := cluster.job(job_id)).state == "RUNNING" and job.attempt == 2,
        "the job to go on in a second attempt",
    )
    (present, *_) = cluster.presents(job_id, 2)
    assert present.resumed_step >= 29
    cluster.wait_step(job_id, present.resumed_step + 5)
    # It was planned, so it is nobody's fault.
    assert not cluster.incidents(job_id)
    with cluster.client as client:
        assert {node.state for node in client.nodes()} == {"ASSIGNED"}
    # Steps that the first agents had not told before they ended are told by the second.
    losses = cluster.losses(job_id)
    assert list(losses) == list(range(1, max(losses) + 1))
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")


def test_job_without_a_spare_waits_and_says_for_what_until_a_node_joins(
    cluster: Cluster,
    process: Controller,
    tmp_path: Path,
    fault_free: dict[int, float],
    slowest_steps: Desk,
) -> None:
    job_id = cluster.submit()
    cluster.wait_step(job_id, 10)
    # The node of rank 0: what it had not reported yet, only the others know.
    lost = cluster.job(job_id).nodes[0]
    lose_node(process.state_dir, lost)
    slowest_steps.speed_up()
    job = cluster.wait_state(job_id, "PROVISIONING")
    wait_for(
        lambda: "waiting for 1 more node(s)" in cluster.job(job_id).reason, "a reason in words"
    )
    assert lost in cluster.job(job_id).reason
    agent = start_agent(process, tmp_path)
    try:
        job = cluster.wait_state(job_id, "SUCCEEDED")
    finally:
        agent.terminate()
        agent.wait(timeout=DEADLINE_S)
    assert "node-9" in job.nodes
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, list(incident.culprit_nodes)) == ("node_lost", [lost])
    assert cluster.losses(job_id) == fault_free


def start_agent(process: Controller, folder: Path) -> subprocess.Popen[bytes]:
    """A node that joins by hand, as `outlast agent` makes it."""
    command = [sys.executable, "-m", "controller.agent", "--node", "node-9"]
    command += ["--controller", process.grpc, "--workers", "1"]
    command += ["--state-dir", str(folder / "agent"), "--memory-dir", str(folder / "memory")]
    command += ["--data-dir", str(process.state_dir / "data"), *process.join_arguments]
    with (folder / "agent.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
