"""Scripts with `session.healing` in real processes: who is left when a peer is lost lives on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.script_jobs import (
    EXAMPLES,
    PACED,
    STEP_LINE,
    log_of,
    losses,
    submit,
    succeeded,
    wait_step,
)

pytestmark = pytest.mark.timeout(300)

STEPS = 60


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A controller with a node more than a job has."""
    state_dir = tmp_path_factory.mktemp("healing-scripts") / "state"
    nodes = ("--local-nodes", "3", "--workers-per-node", "1")
    with controller(state_dir, *nodes, *QUICKLY_CHECKED) as it:
        yield it


@pytest.fixture(scope="module")
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(3)
    return cluster


@pytest.fixture(scope="module")
def fault_free(cluster: Cluster) -> dict[int, str]:
    job_id = healing(cluster)
    succeeded(cluster, job_id)
    return losses(cluster, job_id)


def healing(cluster: Cluster, script: Path = EXAMPLES / "ddp_healing.py", **more: Any) -> str:
    # Small messages: who sends more to a rank that stands than the kernel takes is not woken.
    arguments = ["--steps", f"{STEPS}", "--hidden", "256"]
    recovery = {"heal": True, **more.pop("recovery", {})}
    return submit(cluster, "python", *PACED, str(script), *arguments, recovery=recovery, **more)


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGKILL, "worker_killed"),
        (signal.SIGSTOP, "hang"),
        (signal.SIGUSR1, "user_error"),
    ],
    ids=["killed", "stopped", "raising"],
)
def test_only_the_rank_that_fails_has_a_new_process(
    cluster: Cluster, fault_free: dict[int, str], number: signal.Signals, cause: str
) -> None:
    job_id = healing(cluster)
    wait_step(cluster, job_id, 12)
    before = [present.pid for present in cluster.presents(job_id, 1)]
    os.kill(before[1], number)
    job = succeeded(cluster, job_id)
    assert (job.attempt, job.restarts, job.step) == (2, 1, STEPS)
    after = [present.pid for present in cluster.presents(job_id, 2)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == cause
    assert incident.resumed_step >= incident.fault_step - 1
    assert losses(cluster, job_id) == fault_free


def test_ranks_live_on_through_one_fault_after_another(
    cluster: Cluster, fault_free: dict[int, str]
) -> None:
    job_id = healing(cluster, recovery={"ladder": ["restart"]})
    first = None
    for attempt in (1, 2, 3):
        wait_step(cluster, job_id, 12 * attempt)
        pids = [present.pid for present in cluster.presents(job_id, attempt)]
        first = first or pids[0]
        assert pids[0] == first
        os.kill(pids[1], signal.SIGKILL)
        wait_for(lambda n=attempt: cluster.job(job_id).attempt == n + 1, "the next attempt")
    assert succeeded(cluster, job_id).attempt == 4
    assert cluster.presents(job_id, 4)[0].pid == first
    assert losses(cluster, job_id) == fault_free


def test_who_leaves_a_node_that_is_drained_is_waited_for_and_nothing_is_done_twice(
    cluster: Cluster, fault_free: dict[int, str]
) -> None:
    job_id = healing(cluster)
    wait_step(cluster, job_id, 12)
    before = [present.pid for present in cluster.presents(job_id, 1)]
    drained = cluster.job(job_id).nodes[1]
    with cluster.client as client:
        client.drain(drained)
    wait_for(lambda: cluster.job(job_id).attempt == 2, "the next attempt")
    job = succeeded(cluster, job_id)
    assert drained not in job.nodes
    after = [present.pid for present in cluster.presents(job_id, 2)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]
    assert len(STEP_LINE.findall(log_of(cluster, job_id))) == STEPS, "no step was done twice"
    assert losses(cluster, job_id) == fault_free
    with cluster.client as client:
        client.uncordon(drained)


def test_a_paused_script_ends_and_is_started_again(
    cluster: Cluster, fault_free: dict[int, str]
) -> None:
    job_id = healing(cluster)
    wait_step(cluster, job_id, 12)
    before = [present.pid for present in cluster.presents(job_id, 1)]
    with cluster.client as client:
        client.pause(job_id)
    cluster.wait_state(job_id, "PAUSED")
    cluster.wait_gone(before)
    with cluster.client as client:
        client.resume(job_id)
    succeeded(cluster, job_id)
    assert losses(cluster, job_id) == fault_free


def test_a_script_that_does_not_heal_is_restarted_as_without(cluster: Cluster) -> None:
    job_id = healing(cluster, EXAMPLES / "ddp_session.py")
    wait_step(cluster, job_id, 12)
    before = [present.pid for present in cluster.presents(job_id, 1)]
    os.kill(before[1], signal.SIGKILL)
    assert succeeded(cluster, job_id).attempt == 2
    after = [present.pid for present in cluster.presents(job_id, 2)]
    assert not set(before) & set(after)
