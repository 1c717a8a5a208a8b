"""The only checkpoint is damaged, and a person decides where a job goes on, in real processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.storage.storage import Storage
from outlast.cli.errors import ExitCode
from outlast.problems import SpecError
from tests.chaos.orders import Desk
from tests.cli.running import outlast
from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICK_CHECKS, HandNodes, hand_nodes
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.held import HELD, STEPS, UPLOADED, held_in_first_attempt

pytestmark = pytest.mark.timeout(400)
NODES = ("node-a", "node-b")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, lasting_desk: Desk) -> Iterator[Controller]:
    with controller(tmp_path_factory.mktemp("choosing") / "state") as it:
        yield it


@pytest.fixture(scope="module")
def nodes(process: Controller) -> Iterator[HandNodes]:
    folder = process.state_dir.with_name("nodes")
    with hand_nodes(process, folder, *NODES, checks=QUICK_CHECKS) as it:
        yield it


@pytest.fixture(scope="module")
def cluster(process: Controller, nodes: HandNodes) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(2)
    return cluster


@pytest.fixture
def desk(lasting_desk: Desk) -> Desk:
    """Without the orders of the test before."""
    lasting_desk.give(())
    lasting_desk.speed_up()
    return lasting_desk


def flip(path: Path) -> None:
    """Change the last byte of a file, or change it back."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def lose_host_memory(nodes: HandNodes) -> None:
    for node in NODES:
        nodes.stop(node)
        shutil.rmtree(nodes.folder(node) / "memory")


def damage_the_only_checkpoint(cluster: Cluster, desk: Desk, nodes: HandNodes) -> tuple[str, Path]:
    """A job that is paused for it, and the file of its checkpoint that is damaged."""
    held_in_first_attempt(desk)
    job_id = cluster.submit(**HELD)
    wait_for(lambda: cluster.job(job_id).HasField("committed_step"), "a committed checkpoint")
    assert cluster.job(job_id).committed_step == UPLOADED
    lose_host_memory(nodes)
    store = cluster.state_dir / "checkpoints" / job_id
    damaged = max(store.glob("step-*/*.distcp"), key=lambda path: path.stat().st_size)
    flip(damaged)
    for node in NODES:
        nodes.start(node)
    job = cluster.wait_state(job_id, "PAUSED")
    assert job.attempt == 2, "one try, and no second without new evidence"
    assert damaged.name in job.reason
    return job_id, damaged


def test_the_job_is_paused_with_the_file_named_and_resumes_when_it_is_whole_again(
    cluster: Cluster, desk: Desk, nodes: HandNodes
) -> None:
    # Nothing is moved: it may be repaired.
    job_id, damaged = damage_the_only_checkpoint(cluster, desk, nodes)
    store = cluster.state_dir / "checkpoints" / job_id
    reason = cluster.job(job_id).reason
    assert f"{store.as_uri()} has no checkpoint that can be loaded" in reason
    assert "do not fit their checksum" in reason
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, incident.action) == ("checkpoint", "pause")
    assert not incident.culprit_nodes
    flip(damaged)
    with cluster.client as client:
        client.resume(job_id)
    assert cluster.wait_state(job_id, "SUCCEEDED").attempt == 3
    assert list(cluster.losses(job_id)) == list(range(1, STEPS + 1))


def test_a_job_whose_only_checkpoint_is_damaged_is_salvaged_and_begun_anew(
    cluster: Cluster, desk: Desk, nodes: HandNodes, tmp_path: Path
) -> None:
    whole = cluster.submit(name="whole", **HELD)
    cluster.wait_state(whole, "SUCCEEDED")
    job_id, damaged = damage_the_only_checkpoint(cluster, desk, nodes)
    for command in ("outlast ckpt salvage", "--checkpoint STEP", "--from-scratch"):
        assert command in cluster.job(job_id).reason

    where = ("--state-dir", str(cluster.state_dir))
    done = outlast("ckpt", "salvage", job_id, "-o", f"{tmp_path}/saved", *where)
    assert done.returncode == ExitCode.JOB_FAILED, done.stderr
    report = json.loads((tmp_path / "saved/salvage.json").read_text())
    assert {each["file"] for each in report["lost"]} == {damaged.name}
    assert report["num_whole"] > 0

    with (
        cluster.client as client,
        pytest.raises(SpecError, match=rf"committed in .*: {UPLOADED}"),
    ):
        client.resume(job_id, checkpoint_step=UPLOADED - 5)
    resumed = outlast("resume", job_id, "--from-scratch", *where)
    assert resumed.returncode == ExitCode.OK, resumed.stderr
    done_job = cluster.wait_state(job_id, "SUCCEEDED")
    assert done_job.attempt == 3
    assert cluster.losses(job_id) == cluster.losses(whole)
    # Set aside, not deleted, and never loaded.
    store = cluster.state_dir / "checkpoints" / job_id
    assert (store / f"quarantine/{UPLOADED:08}.1.json").exists()
    assert damaged.exists()
    status = outlast("status", job_id, *where).stdout
    assert "attempt 3 began from scratch, as chosen" in " ".join(status.split())
    report_text = outlast("report", job_id, *where).stdout
    assert "began from scratch, as chosen" in " ".join(report_text.split())


def test_a_chosen_older_checkpoint_gives_the_losses_of_the_uninterrupted_run(
    cluster: Cluster, desk: Desk
) -> None:
    checkpoint = {"storage_interval_steps": 8, "keep": 20}
    whole = cluster.submit(name="whole", steps=120, checkpoint=checkpoint)
    cluster.wait_state(whole, "SUCCEEDED")
    # It must not end before it is paused.
    desk.slow_down("steps", step_s=0.2)
    job_id = cluster.submit(steps=120, checkpoint=checkpoint)
    # A slow upload may leave checkpoints out: the one to go back to is whichever came first.
    wait_for(lambda: cluster.job(job_id).committed_step > 0, "a committed checkpoint")
    first = cluster.job(job_id).committed_step
    wait_for(lambda: cluster.job(job_id).committed_step > first, "another one")
    with cluster.client as client:
        with pytest.raises(Exception, match="not paused"):
            client.resume(job_id, checkpoint_step=first)
        client.pause(job_id)
    cluster.wait_state(job_id, "PAUSED")
    desk.speed_up()
    store = Storage(str(cluster.state_dir / "checkpoints" / job_id))
    wait_for(lambda: not [e for e in store.entries("") if "parts" in e.name], "uploads")
    assert max(store.committed_steps()) > first
    with cluster.client as client:
        client.resume(job_id, checkpoint_step=first)
    job = cluster.wait_state(job_id, "SUCCEEDED")
    (chosen,) = job.chosen_starts
    assert (chosen.step, chosen.attempt, job.attempt) == (first, 1, 2)
    assert cluster.losses(job_id) == cluster.losses(whole)
    assert job.committed_step == 120
    # Nothing of the first attempt beyond the choice is committed any more.
    attempts = {step: store.read_commit(step)[0].attempt for step in store.committed_steps()}
    assert all(attempt == 2 for step, attempt in attempts.items() if step > first)
    with cluster.client as client, pytest.raises(Exception, match="SUCCEEDED"):
        client.resume(job_id, from_scratch=True)
