"""Two people, three jobs, one preemption and the loss of a node, with real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.access import Access
from outlast.client import Client
from tests.chaos.orders import Desk
from tests.controller.access.certificates import tokens_file
from tests.controller.processes import Controller, controller
from tests.e2e.cluster import TINY, Cluster, wait_for

TWO = {"parallel": {"dp": 2, "micro_batch": 2}}
ONE = {"parallel": {"dp": 1, "micro_batch": 2}}


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    return tokens_file(tmp_path / "tokens.yaml")


@pytest.fixture
def process(tmp_path: Path, tokens: dict[str, str], desk: Desk) -> Iterator[Controller]:
    """Three nodes and a spare one, which two people share."""
    config = tmp_path / "controller.yaml"
    config.write_text("queue: {owners: {kim: 3}}\n")
    options = (
        *("--local-nodes", "3", "--standby", "1", "--workers-per-node", "1"),
        *("--tokens-file", str(tmp_path / "tokens.yaml"), "--config", str(config)),
    )
    with controller(tmp_path / "state", *options) as found:
        yield found


def test_an_urgent_job_takes_the_place_of_another_which_goes_on_later(
    process: Controller,
    tokens: dict[str, str],
    desk: Desk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = tmp_path / "olga"
    token.write_text(tokens["olga"])
    monkeypatch.setenv("OUTLAST_TOKEN_FILE", str(token))
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(4)

    def submit(owner: str, name: str, **changes: object) -> str:
        with Client(process.grpc, access=Access(token=tokens[owner])) as client:
            return client.submit({**TINY, "name": name, **changes}).job_id

    desk.slow_down("steps", step_s=0.3)
    # However slow the machine, its last step is stored before it makes room.
    patient = {**TINY["recovery"], "stop_timeout_s": 60}
    long = submit("sam", "long", **TWO, recovery=patient)
    # Not of a lower priority: which of two jobs makes room depends on which of them runs last.
    beside = submit("kim", "beside", **ONE, queue={"priority": 10})
    cluster.wait_step(long, 5)
    # Three of the four nodes are in use: it needs two.
    urgent = submit("kim", "urgent", **TWO, queue={"priority": 10, "preempts": True})
    cluster.wait_state(urgent, "RUNNING")
    waiting = cluster.job(long)
    assert (waiting.state, waiting.yields, waiting.owner) == ("QUEUED", 1, "sam")
    assert "made room for urgent" in waiting.reason or "waiting for" in waiting.reason
    # Its last step was stored first.
    assert waiting.committed_step == waiting.step
    cluster.wait_step(urgent, 3)
    # A node of the urgent job is lost, and the last free one takes its place.
    lost = cluster.job(urgent).nodes[1]
    noted = json.loads((process.state_dir / "nodes" / lost / "process.json").read_text())
    os.kill(noted["pid"], signal.SIGKILL)
    wait_for(lambda: cluster.job(urgent).attempt == 2, "the urgent job to go on elsewhere")
    desk.speed_up()
    for job_id in (urgent, beside, long):
        cluster.wait_state(job_id, "SUCCEEDED")
    assert cluster.job(long).restarts == 1
    assert cluster.incidents(long) == ()
    # No step is done twice, and none differs from those of a run by itself.
    alone = submit("sam", "alone", **TWO)
    cluster.wait_state(alone, "SUCCEEDED")
    assert cluster.losses(long) == cluster.losses(alone) == cluster.losses(urgent)
    # And nobody may touch what is another's.
    with Client(process.grpc, access=Access(token=tokens["kim"])) as client:
        assert {job.owner for job in client.list()} == {"sam", "kim"}
