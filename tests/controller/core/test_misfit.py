"""A job that does not fit costs no node: it looks elsewhere, waits, or fails with the reason."""

from __future__ import annotations

import pytest

from controller.core.capacity import Capacity, NodeNeed, capacities_in_words, is_no_larger, lacking
from controller.core.kinds import Action, Cause
from controller.core.misfit import MAX_TIMES_OCCUPIED, why_not
from controller.core.node_events import NodeJoined
from controller.core.settings import Settings
from controller.core.states import FREE, JobState, NodeState
from outlast.ids import JobId, NodeId
from tests.controller.core.driver import JOB, Driver

GIB = 1 << 30
SMALL = Capacity(cpus=2, memory_bytes=24 * GIB, host_memory_bytes=12 * GIB)
LARGE = Capacity(
    gpus=8,
    gpu_model="H100",
    gpu_memory_bytes=80 * GIB,
    cpus=96,
    memory_bytes=1024 * GIB,
    host_memory_bytes=512 * GIB,
)
OTHER_JOB = JobId("other")


def join(driver: Driver, node: str, capacity: Capacity | None, incarnation: str = "one") -> None:
    driver.send(
        NodeJoined(
            node=NodeId(node),
            incarnation=incarnation,
            address=node,
            rendezvous_port=4242,
            workers=1,
            statuses=(),
            capacity=capacity,
        )
    )


def fleet(*capacities: Capacity | None, settings: Settings | None = None) -> Driver:
    driver = Driver(settings=settings)
    for number, capacity in enumerate(capacities, 1):
        join(driver, f"n{number}", capacity)
    return driver


def refuse(driver: Driver, node: str, kind: str = "misfit", detail: str = "no room") -> None:
    """A node says at the start that the job does not fit; every other node stops its workers."""
    command = f"{JOB}/a{driver.attempt()}/start/{node}"
    driver.answer(command, ok=False, error_kind=kind, detail=detail)
    driver.answer_all("/stop/")


def assert_no_node_is_blamed(driver: Driver) -> None:
    for node in driver.machine.state.nodes.values():
        assert node.state in (*FREE, NodeState.ASSIGNED), node
        assert not node.quarantines_s
        assert not node.cordoned


def test_a_job_that_needs_gpus_is_never_started_where_there_are_none() -> None:
    driver = fleet(SMALL, SMALL, SMALL, SMALL)
    driver.submit(need=NodeNeed(gpus=1))
    job = driver.job()
    assert job.state is JobState.QUEUED
    assert "needs 2 with 1 worker place and 1 GPU each, has 0" in job.reason
    assert "4 nodes: 1 worker place, 0 GPUs, 24.0 GiB of memory" in job.reason
    assert "none fit" in job.reason
    driver.submit(OTHER_JOB)
    assert driver.job(OTHER_JOB).state is JobState.PREFLIGHT
    assert_no_node_is_blamed(driver)


def test_a_job_takes_the_nodes_that_fit() -> None:
    driver = fleet(SMALL, LARGE, SMALL, LARGE)
    driver.submit(need=NodeNeed(gpus=1, host_memory_bytes=100 * GIB))
    assert driver.job().nodes == ("n2", "n4")


def test_a_job_waits_for_nodes_that_fit_and_starts_when_they_come() -> None:
    driver = fleet(SMALL, LARGE)
    driver.submit(need=NodeNeed(gpus=1))
    assert "1 of them fit" in driver.job().reason
    join(driver, "n3", LARGE)
    assert driver.job().nodes == ("n2", "n3")


def test_a_refusal_that_all_nodes_would_repeat_fails_the_job_and_blames_no_node() -> None:
    driver = fleet(SMALL, SMALL, SMALL, SMALL)
    driver.submit()
    driver.answer_all("/suite/")
    refuse(driver, "n1", detail="slots need 40 GiB and host memory holds 12 GiB")
    job, incident = driver.job(), driver.incident()
    assert (job.state, incident.cause, incident.action) == (
        JobState.FAILED,
        Cause.MISFIT,
        Action.FAIL,
    )
    assert incident.culprits == ()
    assert "slots need 40 GiB" in job.reason
    assert "4 nodes: 1 worker place, 0 GPUs" in job.reason
    assert "resources.workers_per_node" in job.reason
    assert job.retry_left == job.plan.retry_budget
    assert_no_node_is_blamed(driver)
    driver.submit(OTHER_JOB)
    assert driver.job(OTHER_JOB).state is JobState.PREFLIGHT


def test_a_job_goes_to_larger_nodes_when_small_ones_refuse_it() -> None:
    driver = fleet(SMALL, SMALL, LARGE, LARGE)
    driver.submit()
    driver.answer_all("/suite/")
    assert driver.job().nodes == ("n1", "n2")
    refuse(driver, "n1")
    driver.answer_all("/suite/")
    job = driver.job()
    # What n1 has not, n2 has neither: it is not tried in vain.
    assert (job.nodes, job.attempt) == (("n3", "n4"), 2)
    assert job.retry_left == job.plan.retry_budget
    assert_no_node_is_blamed(driver)


def test_a_refused_job_waits_where_the_cluster_may_bring_other_nodes() -> None:
    driver = fleet(SMALL, SMALL, settings=Settings(brings_nodes=True))
    driver.submit()
    driver.answer_all("/suite/")
    refuse(driver, "n2", detail="no room for slots")
    job = driver.job()
    assert job.state is JobState.PROVISIONING
    assert "no room for slots" in job.reason
    join(driver, "n3", LARGE)
    join(driver, "n4", LARGE)
    driver.answer_all("/suite/")
    assert driver.job().nodes == ("n3", "n4")
    assert_no_node_is_blamed(driver)


def test_memory_that_something_else_uses_is_asked_for_again() -> None:
    driver = fleet(SMALL, SMALL)
    driver.submit()
    driver.answer_all("/suite/")
    refuse(driver, "n1", kind="occupied", detail="10 GiB are in use")
    job = driver.job()
    assert job.state is JobState.PROVISIONING
    assert "10 GiB are in use" in job.reason
    driver.wait(29.0)
    assert driver.job().state is JobState.PROVISIONING
    driver.wait(2.0)
    driver.answer_all("/suite/")
    assert (driver.job().nodes, driver.job().attempt) == (("n1", "n2"), 2)
    assert_no_node_is_blamed(driver)


def test_a_node_that_stays_occupied_says_nothing_of_others_like_it() -> None:
    driver = fleet(SMALL, SMALL)
    driver.submit()
    driver.answer_all("/suite/")
    for times in range(MAX_TIMES_OCCUPIED):
        refuse(driver, "n1", kind="occupied", detail="10 GiB are in use")
        driver.wait(31.0 * 2**times)
        driver.answer_all("/suite/")
    job = driver.job()
    # One of the two is given up, and there is no third.
    assert job.state is JobState.FAILED
    assert [known.node for known in job.misfits] == ["n1"]
    driver = fleet(SMALL, SMALL, SMALL)
    driver.submit()
    driver.answer_all("/suite/")
    for times in range(MAX_TIMES_OCCUPIED):
        if "n1" in driver.job().nodes:
            refuse(driver, "n1", kind="occupied", detail="10 GiB are in use")
            driver.wait(31.0 * 2**times)
            driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    assert_no_node_is_blamed(driver)


def test_a_node_that_is_brought_and_no_larger_is_not_tried() -> None:
    driver = fleet(SMALL, SMALL, settings=Settings(brings_nodes=True))
    driver.submit()
    driver.answer_all("/suite/")
    refuse(driver, "n1", detail="no room for slots")
    for number in range(3, 9):
        join(driver, f"n{number}", SMALL)
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.PROVISIONING, 1)
    assert "has no more than n1: no room for slots" in " ".join(
        why_not(job, node, driver.now_s) for node in driver.machine.state.nodes.values()
    )
    assert_no_node_is_blamed(driver)


def test_a_node_whose_agent_started_anew_is_asked_again() -> None:
    driver = fleet(SMALL, SMALL, SMALL, LARGE, settings=Settings(brings_nodes=True))
    driver.submit()
    driver.answer_all("/suite/")
    refuse(driver, "n1")
    assert driver.job().state is JobState.PROVISIONING
    join(driver, "n1", LARGE, incarnation="two")
    assert set(driver.job().nodes) == {"n1", "n4"}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_says_so_is_believed_as_the_agent_is(rank: int) -> None:
    driver = fleet(SMALL, SMALL, SMALL)
    driver.submit()
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    ended = driver.exited(
        rank, code=1, fault_class="misfit", detail="no room for the slots", completed_step=-1
    )
    driver.send(ended)
    # What the others say when it is gone.
    driver.send(driver.exited(1 - rank, code=1, fault_class="cascade", detail="connection closed"))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.FAILED
    assert driver.incident().cause is Cause.MISFIT
    assert_no_node_is_blamed(driver)


def test_a_lost_node_is_dealt_with_before_a_misfit() -> None:
    driver = fleet(SMALL, SMALL, SMALL)
    driver.submit()
    driver.answer_all("/suite/")
    command = f"{JOB}/a1/start/n1"
    driver.answer(command, ok=False, error_kind="misfit", detail="no room")
    driver.lose("n2")
    driver.answer_all("/stop/")
    assert driver.incident().cause is Cause.NODE_LOST
    assert driver.incident().culprits == ("n2",)


def test_a_node_that_does_not_say_what_it_has_is_tried() -> None:
    driver = fleet(None, None)
    driver.submit(need=NodeNeed(gpus=1))
    assert driver.job().state is JobState.PREFLIGHT


def test_what_is_lacking_is_said_with_both_numbers() -> None:
    need = NodeNeed(gpus=8, host_memory_bytes=100 * GIB)
    assert lacking(need, SMALL) == (
        "needs 8 GPUs and has 0; needs 100.0 GiB of host memory for checkpoints and "
        "can hold 12.0 GiB"
    )
    assert lacking(need, LARGE) == ""
    assert lacking(need, None) == ""


def test_nodes_that_are_alike_are_told_together() -> None:
    found = [(1, SMALL)] * 3 + [(8, LARGE)] * 5 + [(1, None)]
    assert capacities_in_words(found) == (
        "5 nodes: 8 worker places, 8 GPUs (H100 of 80.0 GiB), 1024.0 GiB of memory, "
        "512.0 GiB of it for checkpoints, 96 CPUs; "
        "3 nodes: 1 worker place, 0 GPUs, 24.0 GiB of memory, 12.0 GiB of it for checkpoints, "
        "2 CPUs; "
        "1 node: 1 worker place, and its agent does not say what else it has"
    )


def test_a_node_is_no_larger_than_itself_and_than_larger_ones() -> None:
    assert is_no_larger(SMALL, SMALL)
    assert is_no_larger(SMALL, LARGE)
    assert not is_no_larger(LARGE, SMALL)
    assert not is_no_larger(None, SMALL)


def test_checks_longer_than_the_job_allows_cost_no_node() -> None:
    """They were all cordoned, one after another, and stayed so when the job was gone."""
    driver = fleet(*[SMALL] * 4)
    driver.submit(preflight_timeout_s=0.01)
    for _ in range(20 * MAX_TIMES_OCCUPIED):
        driver.wait(60.0)
        assert_no_node_is_blamed(driver)
    job = driver.job()
    assert job.state in (JobState.QUEUED, JobState.PROVISIONING)
    assert "its checks took longer than recovery.preflight_timeout_s, 0.01 s" in job.reason
    assert "none fit" in job.reason
    driver.submit(OTHER_JOB)
    driver.answer_all("/suite/")
    assert driver.job(OTHER_JOB).state is JobState.STARTING


def test_a_node_whose_checks_the_job_did_not_wait_for_is_asked_again() -> None:
    driver = fleet(SMALL, SMALL)
    driver.submit(preflight_timeout_s=5.0)
    driver.wait(6.0)
    assert driver.job().state is not JobState.PREFLIGHT
    driver.wait(31.0)
    assert driver.job().state is JobState.PREFLIGHT
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
