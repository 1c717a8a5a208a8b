"""Real GPUs under real jobs, over NCCL; other tests cover the same paths on CPUs.

One GPU is enough: local nodes share it, a rank each.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.v1 import jobs_pb2
from tests.controller.processes import controller
from tests.e2e.cluster import Cluster
from tests.e2e.script_jobs import EXAMPLES, losses, submit, succeeded, wait_step

# First starts compile operations, and ranks take turns on a GPU that they share.
START_S = 240.0

pytestmark = pytest.mark.timeout(400)

STEPS = 60
# Small, but with a width that kernels of GPUs are made for.
MODEL = {"layers": 4, "hidden": 256, "heads": 4, "seq_len": 128}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero-1": {"dp": 2, "zero": {"level": 1}},
    "zero-3": {"dp": 2, "zero": {"level": 3}},
    "tp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
    "tp-pp": {"tp": 2, "pp": 2, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    state_dir = tmp_path_factory.mktemp("cuda") / "state"
    with controller(state_dir, "--local-nodes", "4", "--workers-per-node", "1") as process:
        cluster = Cluster(process.state_dir, lambda: process.grpc)
        cluster.wait_nodes(4)
        yield cluster


def changes(device: str = "cuda", **parallel: Any) -> dict[str, Any]:
    return {
        "steps": STEPS,
        "model": MODEL,
        "parallel": {"dp": 1, "micro_batch": 2, **parallel},
        "data": {"global_batch": 8},
        "resources": {"workers_per_node": 1, "device": device},
    }


def trained(cluster: Cluster, **document: Any) -> tuple[jobs_pb2.Job, dict[int, float]]:
    job_id = cluster.submit(**document)
    job = cluster.wait_state(job_id, "SUCCEEDED", within_s=START_S)
    return job, cluster.losses(job_id)


@pytest.fixture(scope="module")
def on_cpu(cluster: Cluster) -> dict[int, float]:
    """Losses of one rank on a CPU."""
    return trained(cluster, **changes("cpu"))[1]


@pytest.fixture(scope="module")
def on_gpu(cluster: Cluster, on_cpu: dict[int, float]) -> dict[int, float]:
    """Losses of one rank on a GPU."""
    return trained(cluster, **changes())[1]


def test_losses_on_a_gpu_are_those_on_a_cpu(
    on_cpu: dict[int, float], on_gpu: dict[int, float]
) -> None:
    assert list(on_gpu) == list(range(1, STEPS + 1))
    for step in range(1, 11):
        assert on_gpu[step] == pytest.approx(on_cpu[step], rel=1e-5), step
    # Rounding that differs has grown by then.
    assert on_gpu[STEPS] == pytest.approx(on_cpu[STEPS], rel=1e-3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_over_nccl_has_the_losses_of_one_rank(
    cluster: Cluster, on_gpu: dict[int, float], name: str
) -> None:
    job, found = trained(cluster, **changes(**LAYOUTS[name]))
    assert job.attempt == 1
    assert list(found) == list(on_gpu)
    for step in range(1, 11):
        assert found[step] == pytest.approx(on_gpu[step], rel=1e-5), step
    assert found[STEPS] == pytest.approx(on_gpu[STEPS], rel=1e-3)


@pytest.mark.parametrize("name", ["one", "zero-3", "tp-pp"])
def test_job_that_loses_a_worker_has_the_same_losses(cluster: Cluster, name: str) -> None:
    document = changes(**LAYOUTS.get(name, {}))
    document["steps"] = 200
    _, fault_free = trained(cluster, **document)
    job_id = cluster.submit(**document)
    cluster.wait_state(job_id, "RUNNING", within_s=START_S)
    cluster.wait_step(job_id, 40)
    cluster.kill_rank(job_id, attempt=1, rank=0)
    job = cluster.wait_state(job_id, "SUCCEEDED", within_s=START_S)
    assert job.attempt == 2
    (incident,) = cluster.incidents(job_id)
    assert (incident.cause, incident.action) == ("worker_killed", "restart_in_place")
    assert incident.steps_redone <= 1
    assert cluster.losses(job_id) == fault_free
    print(name, *(entry.detail for entry in incident.timeline), sep="\n")


@pytest.fixture(scope="module")
def in_fp64(cluster: Cluster) -> dict[int, float]:
    """Losses of one rank on a GPU in double precision."""
    return trained(cluster, **changes(), precision="fp64")[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit_training_learns_as_fp64_does(
    cluster: Cluster, in_fp64: dict[int, float], precision: str
) -> None:
    _, found = trained(cluster, **changes(tp=2), precision=precision)
    assert found[1] == pytest.approx(in_fp64[1], rel=1e-2)
    assert found[STEPS] == pytest.approx(in_fp64[STEPS], rel=5e-2)


@pytest.mark.parametrize("name", ["one", "zero-3", "tp-pp"])
def test_the_plan_is_right_about_memory(cluster: Cluster, name: str) -> None:
    """What torch's allocator has counted at its peak is no more than was planned, nor far less."""
    # Large enough that what an allocator rounds up is little of it.
    large = {"layers": 8, "hidden": 1024, "heads": 8, "seq_len": 512}
    document = changes(**LAYOUTS.get(name, {}))
    document |= {"steps": 100_000, "model": large}
    job_id = cluster.submit(**document)
    cluster.wait_state(job_id, "RUNNING", within_s=START_S)
    cluster.wait_step(job_id, 10)
    use = cluster.job(job_id).step_use
    with cluster.client as client:
        client.cancel(job_id)
    cluster.wait_state(job_id, "CANCELLED")
    assert 0.6 <= use.peak_memory_bytes / use.expected_memory_bytes <= 1.05


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("ddp_session.py", ["--steps", "300", "--hidden", "1024"]),
        ("fsdp2_session.py", ["--steps", "300", "--hidden", "1024"]),
        ("hf_trainer_session.py", ["--steps", "200", "--output", "trained"]),
        ("lightning_session.py", ["--epochs", "20"]),
    ],
)
def test_a_script_over_nccl_goes_on_from_host_memory_a_step_back_at_most(
    cluster: Cluster, tmp_path: Path, script: str, arguments: list[str]
) -> None:
    command = ["python", str(EXAMPLES / script), *arguments]
    place = {"working_dir": str(tmp_path)}
    fault_free = submit(cluster, *command, workload=place)
    succeeded(cluster, fault_free)
    job_id = submit(cluster, *command, workload=place)
    wait_step(cluster, job_id, 40)
    os.kill(cluster.presents(job_id, 1)[1].pid, signal.SIGKILL)
    job = succeeded(cluster, job_id)
    assert (job.attempt, job.restarts) == (2, 1)
    (incident,) = cluster.incidents(job_id)
    assert incident.steps_redone <= 1
    assert losses(cluster, job_id) == losses(cluster, fault_free)
    print(script, *(entry.detail for entry in incident.timeline), sep="\n")
