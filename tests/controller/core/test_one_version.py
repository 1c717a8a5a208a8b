"""Nodes of a job whose agents are of two versions: it waits, and starts once they are of one."""

from __future__ import annotations

from controller.core.node_events import NodeLeft
from controller.core.states import JobState
from outlast.ids import NodeId
from tests.controller.core.driver import Driver


def upgrade(driver: Driver, node: str, version: str) -> None:
    """The agent ends in order, and another one takes its place."""
    before = driver.node(node).incarnation
    driver.send(NodeLeft(node=NodeId(node), incarnation=before))
    driver.join(node, incarnation=f"{version} on {node}", predecessor=before, version=version)


def running(*versions: str) -> Driver:
    driver = Driver()
    for number, version in enumerate(versions, 1):
        driver.join(f"n{number}", version=version)
    driver.submit(preflight=False)
    driver.answer_all("/start/")
    return driver


def test_a_job_whose_agents_are_upgraded_one_by_one_waits_for_the_last() -> None:
    driver = running("0.1.0", "0.1.0")
    assert driver.job().attempt == 1
    upgrade(driver, "n1", "0.2.0")
    driver.answer_all("/stop/")
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.PROVISIONING, 1)
    assert job.reason == (
        "waiting for one version of Outlast on its nodes, whose agents run n1: 0.2.0; n2: 0.1.0"
    )
    upgrade(driver, "n2", "0.2.0")
    driver.answer_all("/stop/")
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.STARTING, 2)


def test_a_new_job_takes_nodes_of_one_version() -> None:
    driver = running("0.1.0", "0.2.0", "0.2.0")
    assert driver.job().nodes == ("n2", "n3")
    assert driver.job().attempt == 1


def test_of_two_versions_and_not_enough_nodes_of_either_a_job_waits() -> None:
    driver = running("0.1.0", "0.2.0")
    assert driver.job().state is JobState.PROVISIONING
    assert "n1: 0.1.0; n2: 0.2.0" in driver.job().reason
    upgrade(driver, "n1", "0.2.0")
    assert driver.job().state is JobState.STARTING


def test_an_agent_that_does_not_say_its_version_suits_all() -> None:
    assert running("", "0.2.0").job().attempt == 1
