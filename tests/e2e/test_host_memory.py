"""A job whose checkpoints fit a node's host memory by a hair runs; one that does not never costs
a node."""

from __future__ import annotations

import mmap
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint.sizing import node_host_memory_bytes
from outlast.problems import SpecError
from outlast.spec.parse import parse_spec
from tests.controller.processes import Controller, controller
from tests.e2e.by_hand import hand_nodes
from tests.e2e.cluster import Cluster, spec, wait_for

pytestmark = pytest.mark.timeout(300)

ONE_NODE: dict[str, Any] = {
    "steps": 5,
    "parallel": {"dp": 1},
    "checkpoint": {"storage_interval_steps": 5},
}
# 3 KiB of state more: less than a page of each of its three slots.
LARGER: dict[str, Any] = {**ONE_NODE, "model": {"vocab_size": 264}}


def needed_bytes(changes: dict[str, Any]) -> int:
    return node_host_memory_bytes(parse_spec(spec(**changes)))


def mount(folder: Path, size_bytes: int, *options: str) -> bool:
    given = ",".join((*options, f"size={size_bytes}"))
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", given, "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    return done.returncode == 0


@pytest.fixture
def exact(tmp_path: Path) -> Iterator[tuple[Cluster, Path]]:
    """A cluster of one node, whose host memory is what the job needs, to the page."""
    memory = tmp_path / "nodes" / "only" / "memory"
    memory.mkdir(parents=True)
    pages = -(-needed_bytes(ONE_NODE) // mmap.PAGESIZE)
    if not mount(memory, pages * mmap.PAGESIZE):
        pytest.skip("mounting a small file system takes root")
    try:
        with (
            controller(tmp_path / "state", "--local-nodes", "0") as process,
            hand_nodes(process, tmp_path / "nodes", "only"),
        ):
            cluster = cluster_of(process)
            cluster.wait_nodes(1)
            yield cluster, memory
    finally:
        subprocess.run(["umount", "--lazy", str(memory)], check=True)


def cluster_of(process: Controller) -> Cluster:
    return Cluster(process.state_dir, lambda: process.grpc)


def states_of_nodes(cluster: Cluster) -> list[str]:
    with cluster.client as client:
        return [node.state for node in client.nodes()]


def test_what_fits_by_a_hair_runs_and_what_does_not_is_refused_with_the_numbers(
    exact: tuple[Cluster, Path],
) -> None:
    cluster, memory = exact
    holds, wanted = needed_bytes(ONE_NODE), needed_bytes(LARGER)
    pages = -(-holds // mmap.PAGESIZE) * mmap.PAGESIZE
    assert pages < wanted < holds + 3 * mmap.PAGESIZE
    with cluster.client as client:
        fit = client.check_fit(spec(**LARGER))
        assert (fit.connected, fit.fitting) == (1, 0)
        with pytest.raises(SpecError, match=f"{wanted:,} bytes of each node.*{pages:,} bytes"):
            client.submit(spec(**LARGER))
        assert client.check_fit(spec(**ONE_NODE)).fitting == 1

    job_id = cluster.submit(**ONE_NODE)
    assert cluster.wait_state(job_id, "SUCCEEDED").attempt == 1

    # Smaller since the agent said what it has: the node itself finds out, and no worker is made.
    # The kernel refuses it as long as the job that has ended holds memory.
    wait_for(lambda: mount(memory, pages // 2, "remount"), "host memory to be free")
    job_id = cluster.submit(**ONE_NODE, name="later")
    job = cluster.wait_state(job_id, "FAILED")
    assert "host memory" in job.reason
    assert "in all" in job.reason
    (incident,) = cluster.incidents(job_id)
    assert incident.cause == "misfit"
    assert not list(memory.parent.glob(f"state/jobs/{job_id}/a1/rank-*"))
    assert states_of_nodes(cluster) == ["READY"]
