"""A file that is missing on one node is that node's trouble; on every node it is the job's."""

from __future__ import annotations

import pytest

from controller.core.kinds import Action, Cause, Rung
from controller.core.states import JobState, NodeState
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver

WHERE = "data.source is '/data/text', which is not there"
FILE = "FileNotFoundError: [Errno 2] No such file or directory: '/data/vocab'"


def starting(spares: int) -> Driver:
    return Driver().starting(spares=spares)


def answers(driver: Driver, **missing: str) -> None:
    """Every node answers its start: those named lack a file."""
    for node in driver.job().nodes:
        assert node is not None
        command = f"{JOB}/a{driver.attempt()}/start/{node}"
        if node in missing:
            driver.answer(command, ok=False, error_kind="missing", detail=missing[node])
        else:
            driver.answer(command)
    driver.answer_all("/stop/")


def raises(driver: Driver, rank: int, completed_step: int = -1) -> None:
    driver.send(
        driver.exited(
            rank,
            code=1,
            fault_class="missing",
            fingerprint="f00d",
            detail=f"{FILE} (exception, class 'missing', rule 'not there' of table 3)",
            traceback=f"Traceback: {FILE}",
            completed_step=completed_step,
        )
    )
    driver.answer_all("/stop/")


def assert_no_node_is_blamed(driver: Driver) -> None:
    for node in driver.machine.state.nodes.values():
        assert not node.quarantines_s
        assert node.state in (NodeState.ASSIGNED, NodeState.READY, NodeState.STANDBY), node


def test_data_that_one_node_lacks_moves_the_job_off_it_and_costs_neither_retry_nor_node() -> None:
    driver = starting(spares=1)
    answers(driver, n1=WHERE)
    driver.answer_all("/suite/")
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.STARTING, 2)
    assert set(job.nodes) == {"n2", "n3"}
    assert job.retry_left == job.plan.retry_budget
    incident = driver.incident()
    assert (incident.cause, incident.action) == (Cause.MISFIT, Action.REPLACE_NODES)
    assert "missing on n1 and not on the job's other nodes: data.source is '/data/text'" in (
        incident.reason
    )
    assert_no_node_is_blamed(driver)
    assert driver.node("n1").state is NodeState.READY, "free for jobs that do not read it"


def test_the_job_waits_for_the_answers_of_all_nodes_before_it_takes_one_for_bad() -> None:
    driver = starting(spares=1)
    driver.answer("job/a1/start/n1", ok=False, error_kind="missing", detail=WHERE)
    assert driver.job().state is JobState.STARTING
    driver.answer("job/a1/start/n2", ok=False, error_kind="missing", detail=WHERE)
    driver.answer_all("/stop/")
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert job.reason == (
        "the job cannot start as it is written: missing on every node of the job (n1, n2): " + WHERE
    )
    assert driver.incident().cause is Cause.CONFIG
    assert_no_node_is_blamed(driver)


def test_without_another_node_the_job_fails_and_names_node_and_path() -> None:
    driver = starting(spares=0)
    answers(driver, n2=WHERE)
    job = driver.job()
    assert job.state is JobState.FAILED
    assert "missing on n2 and not on the job's other nodes" in job.reason
    assert "/data/text" in job.reason
    assert "no other node can take its place" in job.reason
    assert_no_node_is_blamed(driver)


def test_another_fault_meanwhile_loses_no_answer() -> None:
    driver = starting(spares=1)
    driver.answer("job/a1/start/n1", ok=False, error_kind="missing", detail=WHERE)
    # A rank elsewhere gives up waiting for the ranks of n1.
    driver.send(driver.exited(1, code=1, fault_class="cascade", detail="rendezvous"))
    driver.answer_all("/stop/")
    assert driver.incident().cause is Cause.MISFIT
    assert "/data/text" in driver.incident().reason


def test_data_that_has_gone_from_all_nodes_pauses_a_job_that_has_trained() -> None:
    driver = Driver().running(spares=0, ladder=(Rung.RESTART, Rung.PAUSE))
    driver.send(driver.exited(0, completed_step=50))
    driver.answer_all("/stop/")
    answers(driver, n1=WHERE, n2=WHERE)
    assert driver.incident(2).cause is Cause.STORAGE
    assert driver.job().state is JobState.PAUSED
    assert "bring it back" in driver.job().reason
    assert_no_node_is_blamed(driver)


def test_a_file_that_a_rank_misses_sends_the_job_elsewhere_until_a_second_node_misses_it() -> None:
    driver = starting(spares=2)
    driver.answer_all("/start/")
    raises(driver, 0)
    driver.answer_all("/suite/")
    assert driver.job().attempt == 2
    assert NodeId("n1") not in driver.job().nodes
    assert "No such file or directory: '/data/vocab'" in driver.incident().reason
    driver.answer_all("/start/")
    raises(driver, 1)
    job = driver.job()
    assert (job.state, job.attempt) == (JobState.FAILED, 2)
    assert "before on n1" in job.reason
    assert job.error == f"Traceback: {FILE}"
    assert_no_node_is_blamed(driver)


def test_ranks_of_all_nodes_that_miss_a_file_fail_the_job_at_once() -> None:
    driver = starting(spares=2)
    driver.answer_all("/start/")
    for rank in (0, 1):
        driver.send(
            driver.exited(
                rank,
                code=1,
                fault_class="missing",
                fingerprint="f00d",
                detail=FILE,
                completed_step=-1,
            )
        )
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.FAILED
    assert driver.incident().cause is Cause.USER_ERROR
    assert f"missing on every node of the job (n1, n2): {FILE}" in driver.job().reason


def test_a_file_that_went_away_after_a_step_may_be_back_for_one_restart() -> None:
    driver = Driver().running(spares=1)
    raises(driver, 0, completed_step=10)
    assert driver.incident().action is Action.RESTART_IN_PLACE
    driver.answer_all("/start/")
    raises(driver, 0, completed_step=10)
    # Twice, and on one of two nodes only.
    assert driver.incident(2).cause is Cause.MISFIT
    driver.answer_all("/suite/")
    assert NodeId("n1") not in driver.job().nodes


@pytest.mark.parametrize("other", ["killed_by_signal", "device"])
def test_what_failed_first_decides(other: str) -> None:
    driver = starting(spares=1)
    driver.answer_all("/start/")
    driver.send(driver.exited(1, fault_class=other, at_s=driver.now_s - 5))
    raises(driver, 0)
    assert driver.incident().cause is not Cause.MISFIT
