"""Jobs with an image of their own: on nodes that run it, with spares that run it."""

from __future__ import annotations

from controller.core.capacity import Capacity, NodeNeed, is_no_larger, lacking
from controller.core.node_events import ImageNotPulled
from controller.core.states import JobState, NodeState
from outlast.ids import JobId
from tests.controller.core.driver import JOB, Driver
from tests.controller.core.test_misfit import join

NEMO = "registry.example/nemo:24"
OWN = Capacity(cpus=8)
THEIRS = Capacity(cpus=8, image=NEMO)
NEEDS = NodeNeed(image=NEMO)
WHY = "ErrImagePull: no such tag"


def fleet(*images: str) -> Driver:
    driver = Driver()
    for number, image in enumerate(images, 1):
        join(driver, f"n{number}", Capacity(cpus=8, image=image))
    return driver


def test_a_node_lacks_the_image_that_it_does_not_run() -> None:
    assert lacking(NEEDS, THEIRS) == ""
    assert lacking(NEEDS, OWN) == f"needs the image {NEMO} and runs the image of the agents"
    assert lacking(NodeNeed(), THEIRS) == f"needs the image of the agents and runs the image {NEMO}"
    # An agent that says nothing of itself is in our own image.
    assert lacking(NEEDS, None) != ""
    assert lacking(NodeNeed(), None) == ""


def test_what_one_image_could_not_do_says_nothing_of_another() -> None:
    assert is_no_larger(OWN, OWN)
    assert not is_no_larger(OWN, THEIRS)


def test_a_job_runs_on_nodes_with_its_image_and_no_other_job_does() -> None:
    driver = fleet("", NEMO, "", NEMO)
    driver.submit(need=NEEDS)
    driver.submit(JobId("plain"))
    assert set(driver.job().nodes) == {"n2", "n4"}
    assert set(driver.job(JobId("plain")).nodes) == {"n1", "n3"}
    driver.submit(JobId("later"), need=NEEDS, nodes=1)
    later = driver.job(JobId("later"))
    assert later.state is JobState.QUEUED
    assert f"needs 1 with 1 worker place and the image {NEMO} each, has 0" in later.reason


def test_spares_are_held_ready_for_each_image() -> None:
    driver = fleet("", NEMO, "", "", NEMO, NEMO)
    driver.submit(need=NEEDS, standby=1)
    driver.submit(JobId("plain"), standby=1)
    for _ in range(2):
        driver.answer_all("/suite/")
    standbys = [
        node.node for node in driver.machine.state.nodes.values() if node.state is NodeState.STANDBY
    ]
    assert len(standbys) == 2
    assert {driver.node(node).image for node in standbys} == {"", NEMO}
    # The one takes the place of a lost node of its image.
    driver.answer_all("/start/")
    lost = driver.job().nodes[0]
    assert lost is not None
    driver.lose(lost)
    driver.answer_all("/stop/")
    (taken,) = (node for node in standbys if driver.node(node).image == NEMO)
    assert taken in driver.job().nodes


def test_a_job_whose_image_cannot_be_pulled_fails_with_the_reason() -> None:
    driver = fleet("", "")
    driver.submit(need=NEEDS)
    driver.submit(JobId("plain"), nodes=3)
    driver.send(ImageNotPulled(image=NEMO, detail=WHY))
    job = driver.job()
    assert job.state is JobState.FAILED
    assert f"workload.image {NEMO} cannot be pulled: {WHY}" in job.error
    assert driver.job(JobId("plain")).state is JobState.QUEUED


def test_an_image_that_some_node_has_is_pulled_in_the_end() -> None:
    driver = fleet(NEMO)
    driver.submit(need=NEEDS)
    driver.send(ImageNotPulled(image=NEMO, detail=WHY))
    assert driver.job().state is JobState.QUEUED


def test_a_job_that_has_run_waits_for_its_image() -> None:
    driver = fleet(NEMO, NEMO)
    driver.submit(need=NEEDS)
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    driver.advanced(1)
    for node in ("n1", "n2"):
        driver.lose(node)
    driver.answer_all("/stop/")
    driver.send(ImageNotPulled(image=NEMO, detail=WHY))
    assert driver.machine.state.jobs[JOB].state is JobState.PROVISIONING
