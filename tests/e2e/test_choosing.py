"""A person decides where a paused job goes on, in real processes."""

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
from tests.e2e.held import HELD, UPLOADED, held_in_first_attempt
from tests.e2e.test_damage import flip

pytestmark = pytest.mark.timeout(400)
NODES = ("node-a", "node-b")


@pytest.fixture
def process(tmp_path: Path, desk: Desk) -> Iterator[Controller]:
    with controller(tmp_path / "state") as it:
        yield it


def lose_host_memory(nodes: HandNodes, folder: Path) -> None:
    for node in NODES:
        nodes.stop(node)
        shutil.rmtree(folder / node / "memory")


def test_a_job_whose_only_checkpoint_is_damaged_is_salvaged_and_begun_anew(
    process: Controller, desk: Desk, tmp_path: Path
) -> None:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    with hand_nodes(process, tmp_path, *NODES, checks=QUICK_CHECKS) as nodes:
        cluster.wait_nodes(2)
        whole = cluster.submit(name="whole", **HELD)
        cluster.wait_state(whole, "SUCCEEDED")
        held_in_first_attempt(desk)
        job_id = cluster.submit(**HELD)
        wait_for(lambda: cluster.job(job_id).HasField("committed_step"), "a committed checkpoint")
        lose_host_memory(nodes, tmp_path)
        store = process.state_dir / "checkpoints" / job_id
        damaged = max(store.glob("step-*/*.distcp"), key=lambda path: path.stat().st_size)
        flip(damaged)
        for node in NODES:
            nodes.start(node)
        job = cluster.wait_state(job_id, "PAUSED")
        assert job.attempt == 2, "one try, and no second without new evidence"
        assert damaged.name in job.reason
        for command in ("outlast ckpt salvage", "--checkpoint STEP", "--from-scratch"):
            assert command in job.reason

        where = ("--state-dir", str(process.state_dir))
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
        assert (store / f"quarantine/{UPLOADED:08}.1.json").exists()
        assert damaged.exists()
        status = outlast("status", job_id, *where).stdout
        assert "attempt 3 began from scratch, as chosen" in " ".join(status.split())
        report_text = outlast("report", job_id, *where).stdout
        assert "began from scratch, as chosen" in " ".join(report_text.split())


def test_a_chosen_older_checkpoint_gives_the_losses_of_the_uninterrupted_run(
    process: Controller, desk: Desk, tmp_path: Path
) -> None:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    checkpoint = {"storage_interval_steps": 8, "keep": 20}
    with hand_nodes(process, tmp_path, *NODES, checks=QUICK_CHECKS):
        cluster.wait_nodes(2)
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
        store = Storage(str(process.state_dir / "checkpoints" / job_id))
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
