"""Agents and a controller of which one is of the previous release: a job recovers all the same.

`tests/skew/proxy.py` makes either side, or both, say no more than 0.1.0 did.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.orders import Desk
from tests.controller.processes import DEADLINE_S, Controller, controller
from tests.e2e.cluster import Cluster, wait_for
from tests.skew.proxy import Passed, Skew, proxied

NODES = ("node-1", "node-2")
SKEWS = {
    "older agents": Skew(agents=True, controller=False),
    "older controller": Skew(agents=False, controller=True),
    "both": Skew(agents=True, controller=True),
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, lasting_desk: Desk) -> Iterator[Controller]:
    """A controller whose agents are started by hand, and look into `line.json` for it."""
    folder = tmp_path_factory.mktemp("skew")
    with controller(folder / "state") as it:
        show_agents(it, it.grpc)
        agents = [start_agent(it, node) for node in NODES]
        try:
            yield it
        finally:
            for agent in agents:
                agent.terminate()
            for agent in agents:
                agent.wait(timeout=DEADLINE_S)


@pytest.mark.parametrize("skew", SKEWS.values(), ids=SKEWS)
def test_job_that_loses_a_worker_has_the_same_losses(
    cluster: Cluster,
    process: Controller,
    fault_free: dict[int, float],
    slow_steps: Desk,
    skew: Skew,
) -> None:
    with line_through_proxy(process, cluster, skew) as passed:
        job_id = cluster.train_with_a_killed_worker(slow_steps.speed_up)
        assert cluster.losses(job_id) == fault_free
        with cluster.client as client:
            logs = list(client.logs(job_id, attempt=1))
        assert {each.rank for each in logs if each.data} == {0, 1}
        assert passed.num_sessions == len(NODES), "no session broke"
    # Hellos and heartbeats of agents, starts of workers by the controller.
    assert bool(passed.from_agents["cut"]) is skew.agents
    assert bool(passed.from_controller["cut"]) is skew.controller


def test_nodes_are_checked_between_a_fault_and_the_restart(
    cluster: Cluster, process: Controller, slow_steps: Desk
) -> None:
    with line_through_proxy(process, cluster, SKEWS["both"]):
        job_id = cluster.submit(recovery={"in_place_restarts": 0})
        cluster.wait_step(job_id, 5)
        cluster.kill_rank(job_id, attempt=1, rank=1)
        slow_steps.speed_up()
        cluster.wait_state(job_id, "SUCCEEDED")
        (incident,) = cluster.incidents(job_id)
        assert {check.node for check in incident.node_checks} == set(NODES)
        # A busy machine may leave a check inconclusive; nothing is broken here.
        assert "fail" not in [check.verdict for check in incident.node_checks]
        assert incident.action == "restart_in_place"


@contextmanager
def line_through_proxy(process: Controller, cluster: Cluster, skew: Skew) -> Iterator[Passed]:
    """Have the agents meet the controller, which starts anew, through a proxy."""
    process.stop()
    process.start()
    with proxied(process.grpc, skew) as passed:
        show_agents(process, passed.address)
        wait_for(lambda: passed.num_sessions == len(NODES), "the agents to come through the proxy")
        cluster.wait_nodes(len(NODES))
        yield passed


def show_agents(process: Controller, address: str) -> None:
    """Where agents look for the controller from their next connection on."""
    draft = line_file(process).with_suffix(".new")
    draft.write_text(json.dumps({"grpc": address}))
    draft.rename(line_file(process))


def line_file(process: Controller) -> Path:
    return process.state_dir.with_name("line.json")


def start_agent(process: Controller, node: str) -> subprocess.Popen[bytes]:
    folder = process.state_dir.parent
    command = [sys.executable, "-m", "controller.agent", "--node", node, "--workers", "1"]
    command += ["--controller", process.grpc, "--controller-file", str(line_file(process))]
    command += ["--state-dir", str(process.state_dir / "nodes" / node)]
    command += ["--memory-dir", str(folder / "memory" / node)]
    command += ["--data-dir", str(process.state_dir / "data"), *process.join_arguments]
    with (folder / f"{node}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
