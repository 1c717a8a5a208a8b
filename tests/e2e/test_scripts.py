"""Scripts of users in real processes: with `outlast.session`, silent, stopped, or wrong.

Those that know nothing of Outlast are in `test_examples`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.v1 import jobs_pb2
from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import QUICKLY_CHECKED
from tests.e2e.cluster import Cluster, wait_for
from tests.e2e.losing import lose_node
from tests.e2e.script_jobs import (
    EXAMPLES,
    PACED,
    RAISING,
    STEP_LINE,
    log_of,
    losses,
    submit,
    succeeded,
    wait_step,
)

pytestmark = pytest.mark.timeout(300)

STEPS = 60
DDP_SESSION = EXAMPLES / "ddp_session.py"
FSDP2_SESSION = EXAMPLES / "fsdp2_session.py"
SILENT = RAISING.with_name("silent.py")


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A controller with two nodes more than a job has."""
    state_dir = tmp_path_factory.mktemp("scripts") / "state"
    nodes = ("--local-nodes", "4", "--workers-per-node", "1")
    with controller(state_dir, *nodes, *QUICKLY_CHECKED) as it:
        yield it


@pytest.fixture(scope="module")
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(4)
    return cluster


@pytest.fixture(scope="module")
def fault_free_session(cluster: Cluster) -> dict[int, str]:
    """Losses of the script with `outlast.session` when nothing happens."""
    job_id = with_session(cluster)
    assert succeeded(cluster, job_id).step == STEPS
    found = losses(cluster, job_id)
    assert list(found) == list(range(1, STEPS + 1))
    return found


def with_session(cluster: Cluster, script: Path = DDP_SESSION, **more: Any) -> str:
    arguments = ["--steps", f"{STEPS}", "--hidden", "1024"]
    return submit(cluster, "python", *PACED, str(script), *arguments, **more)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGUSR1], ids=["killed", "stopped", "raising"]
)
def test_a_script_with_a_session_goes_on_from_host_memory_a_step_back_at_most(
    cluster: Cluster, fault_free_session: dict[int, str], number: signal.Signals
) -> None:
    job_id = with_session(cluster)
    wait_step(cluster, job_id, 12)
    os.kill(cluster.presents(job_id, 1)[1].pid, number)
    job = succeeded(cluster, job_id)
    assert (job.attempt, job.restarts, job.step) == (2, 1, STEPS)
    (incident,) = cluster.incidents(job_id)
    assert incident.fault_step >= 12
    assert incident.resumed_step >= incident.fault_step - 1
    assert "from host memory" in log_of(cluster, job_id)
    assert losses(cluster, job_id) == fault_free_session
    # The curve is the script's own.
    assert cluster.losses(job_id) == {
        step: pytest.approx(float(loss)) for step, loss in fault_free_session.items()
    }


def test_a_paused_script_goes_on_where_all_its_ranks_stopped(
    cluster: Cluster, fault_free_session: dict[int, str]
) -> None:
    job_id = with_session(cluster)
    wait_step(cluster, job_id, 12)
    with cluster.client as client:
        client.pause(job_id)
    cluster.wait_state(job_id, "PAUSED")
    assert not cluster.incidents(job_id)
    with cluster.client as client:
        client.resume(job_id)
    succeeded(cluster, job_id)
    assert len(STEP_LINE.findall(log_of(cluster, job_id))) == STEPS, "no step was done twice"
    assert losses(cluster, job_id) == fault_free_session


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python", "-c", "import no_such_module"], "No module named 'no_such_module'"),
        (["python", "-c", "raise ValueError('world size 1 does not divide 3')"], "does not divide"),
    ],
    ids=["module", "value"],
)
def test_what_a_script_raises_at_once_ends_the_job_with_its_traceback(
    cluster: Cluster, command: list[str], words: str
) -> None:
    job_id = submit(cluster, *command, nodes=1)
    job = wait_for(lambda: failed(cluster, job_id), "the job to fail")
    assert job.attempt == 1, job.reason
    assert words in job.reason
    assert "Traceback (most recent call last)" in job.error


def failed(cluster: Cluster, job_id: str) -> jobs_pb2.Job | None:
    job = cluster.job(job_id)
    assert job.state != "SUCCEEDED"
    return job if job.state == "FAILED" else None


def test_a_script_is_asked_to_stop_with_its_own_signal_and_has_its_grace(
    cluster: Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "careful.py"
    script.write_text(
        "import signal, sys\n"
        "print('up', flush=True)\n"
        "print('asked by', signal.sigwait([signal.SIGUSR2]), flush=True)\n"
        "sys.exit(3)\n"
    )
    workload = {"stop_signal": "SIGUSR2", "stop_grace_s": 60}
    command = ["python", "-c", _BLOCKED + script.read_text()]
    job_id = submit(cluster, *command, nodes=1, workload=workload)
    wait_for(lambda: "up" in log_of(cluster, job_id), "the script to run")
    with cluster.client as client:
        client.pause(job_id)
    job = cluster.wait_state(job_id, "PAUSED")
    assert "asked by 12" in log_of(cluster, job_id)
    assert (job.restarts, len(cluster.incidents(job_id))) == (0, 0)
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")


_BLOCKED = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"


def test_a_script_with_copies_on_other_nodes_goes_on_from_them_when_its_node_is_lost(
    cluster: Cluster, process: Controller
) -> None:
    copied = {"replicas": 1}
    undisturbed = with_session(cluster, FSDP2_SESSION, checkpoint=copied)
    succeeded(cluster, undisturbed)
    job_id = with_session(cluster, FSDP2_SESSION, checkpoint=copied)
    wait_step(cluster, job_id, 12)
    lost = cluster.job(job_id).nodes[1]
    lose_node(process.state_dir, lost)
    job = succeeded(cluster, job_id)
    assert lost not in job.nodes
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, list(incident.culprit_nodes)) == ("node_lost", [lost])
    assert "from host memory" in log_of(cluster, job_id)
    assert incident.resumed_step > 1, "nothing was in storage"
    assert losses(cluster, job_id) == losses(cluster, undisturbed)


def test_a_script_whose_ranks_all_fall_silent_is_restarted(cluster: Cluster) -> None:
    """It reports no steps: nothing but its silence says that it hangs."""
    job_id = submit(
        cluster,
        "python",
        str(SILENT),
        recovery={"hang_timeout_s": 10},
    )
    assert succeeded(cluster, job_id).restarts == 1
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == "hang"
    assert "(recovery.hang_timeout_s is 10 s)" in incident.reason
    assert "ranks 0, 1 do not report operations" in incident.reason
    (stood,) = [entry for entry in incident.timeline if entry.phase == "last_operations"]
    assert "at an operation that is not known (no output and hardly any CPU time" in stood.detail
    # Rank 0 may have lost its connection before its own agent came to look.
    assert ("stacks", 1) in [(item.kind, item.rank) for item in incident.evidence]
