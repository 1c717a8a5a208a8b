"""What end-to-end tests share."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.chaos.orders import Desk
from tests.controller.processes import Controller, controller
from tests.e2e.cluster import Cluster
from tests.e2e.held import obeyed


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails says what became of its jobs, and leaves none to those behind it."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, Cluster):
        report.sections.append(("jobs", cluster.clear()))
    return report


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """Orders for all processes of a test."""
    desk = Desk(tmp_path / "orders")
    with obeyed(desk):
        yield desk


@pytest.fixture(scope="module")
def lasting_desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """Orders for all processes of a module."""
    desk = Desk(tmp_path_factory.mktemp("orders"))
    with obeyed(desk):
        yield desk


@pytest.fixture
def slow_steps(lasting_desk: Desk) -> Iterator[Desk]:
    """No job of many steps ends before something is done to it, nor keeps the machine busy."""
    lasting_desk.slow_down("steps", step_s=0.1)
    yield lasting_desk
    lasting_desk.speed_up()


@pytest.fixture
def slowest_steps(lasting_desk: Desk) -> Iterator[Desk]:
    """A job of 60 steps lasts for half a minute, until it has been struck and is sped up."""
    lasting_desk.slow_down("steps", step_s=0.5)
    yield lasting_desk
    lasting_desk.speed_up()


@pytest.fixture(scope="module")
def workers_per_node() -> int:
    """A module may have others."""
    return 1


@pytest.fixture(scope="module")
def process(
    tmp_path_factory: pytest.TempPathFactory, lasting_desk: Desk, workers_per_node: int
) -> Iterator[Controller]:
    """A controller with two nodes for all tests of a module."""
    state_dir = tmp_path_factory.mktemp("e2e") / "state"
    nodes = ("--local-nodes", "2", "--workers-per-node", f"{workers_per_node}")
    with controller(state_dir, *nodes) as it:
        yield it


@pytest.fixture(scope="module")
def cluster(process: Controller) -> Cluster:
    cluster = Cluster(process.state_dir, lambda: process.grpc)
    cluster.wait_nodes(2)
    return cluster


@pytest.fixture(scope="module")
def fault_free(cluster: Cluster) -> dict[int, float]:
    """The losses of `TINY` without a fault. A module may have another job."""
    job_id = cluster.submit()
    cluster.wait_state(job_id, "SUCCEEDED")
    losses = cluster.losses(job_id)
    assert list(losses) == list(range(1, 61))
    return losses
