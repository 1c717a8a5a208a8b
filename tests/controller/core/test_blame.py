"""Which node a fault is booked on: the one where it began, never the one that reported it."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.kinds import Action, Cause, EvidenceKind
from controller.core.node_events import NodeDisconnected, NodeJoined
from controller.core.states import JobState, NodeState
from outlast.ids import NodeId
from tests.controller.core.driver import Driver

N1 = NodeId("n1")


def lost_peer(driver: Driver, rank: int) -> list[str]:
    """A rank says that it lost its connection to another one."""
    return driver.send(
        driver.exited(rank, code=1, fault_class="cascade", detail="connection closed by peer")
    )


def test_an_agent_restarted_at_once_is_the_first_failure_not_the_rank_that_lost_a_peer() -> None:
    driver = Driver().running(spares=0, nodes=3)
    driver.send(NodeDisconnected(node=N1))
    driver.now_s += 0.5
    lost_peer(driver, 2)
    lost_peer(driver, 1)
    driver.answer("job/a1/stop/n2")
    driver.answer("job/a1/stop/n3")
    assert driver.job().state is JobState.SUSPENDING
    driver.now_s += 1.0
    driver.join("n1", incarnation="two")
    driver.answer("job/a1/stop/n1")
    incident = driver.incident()
    assert incident.culprits == ("n1",)
    assert incident.cause is Cause.WORKERS_MISSING
    assert "the agent of n1 was restarted, and its workers died with it" in incident.reason
    assert driver.node("n1").state is NodeState.SUSPECT
    assert [driver.node(node).state for node in ("n2", "n3")] == [NodeState.ASSIGNED] * 2
    assert driver.job().attempt == 2


def test_an_agent_restarted_before_any_rank_noticed_is_blamed_too() -> None:
    driver = Driver().running(spares=0)
    driver.join("n1", incarnation="two")
    lost_peer(driver, 1)
    driver.answer_all("/stop/")
    assert driver.incident().culprits == ("n1",)
    assert driver.node("n2").state is NodeState.ASSIGNED


def test_a_failure_before_the_agents_restart_is_the_first_one() -> None:
    driver = Driver().running(spares=0)
    driver.send(driver.exited(1, detail="killed by SIGKILL"))
    driver.now_s += 1.0
    driver.send(NodeDisconnected(node=N1))
    driver.join("n1", incarnation="two")
    driver.answer_all("/stop/")
    assert driver.incident().culprits == ("n2",)
    assert driver.incident().cause is Cause.WORKER_KILLED


def test_a_collective_library_that_failed_after_the_agents_end_followed_from_it() -> None:
    driver = Driver().running(spares=0)
    driver.send(driver.exited(1, code=1, fault_class="nccl", detail="ncclInternalError"))
    driver.join("n1", incarnation="two")
    driver.answer_all("/stop/")
    assert driver.incident().culprits == ("n1",)


def test_an_agent_that_had_stopped_its_workers_before_it_was_restarted_did_nothing() -> None:
    driver = Driver().running(spares=0)
    lost_peer(driver, 1)
    driver.answer("job/a1/stop/n1")
    driver.join("n1", incarnation="two")
    driver.answer_all("/stop/")
    kinds = {item.kind for item in driver.incident().evidence}
    assert kinds == {EvidenceKind.WORKER_EXIT}


def test_an_agent_that_only_connects_anew_is_no_sign() -> None:
    driver = Driver().running(spares=0)
    lost_peer(driver, 1)
    driver.send(NodeDisconnected(node=N1))
    driver.join("n1")
    driver.answer_all("/stop/")
    kinds = {item.kind for item in driver.incident().evidence}
    assert kinds == {EvidenceKind.WORKER_EXIT}


def test_an_agent_restarted_while_the_job_stops_for_its_user_opens_no_incident() -> None:
    for ask in (ev.JobPauseRequested, ev.JobCancelRequested):
        driver = Driver().running(spares=0)
        driver.send(ask(job_id=driver.job().job_id))
        driver.join("n1", incarnation="two")
        driver.answer_all("/stop/")
        assert driver.job().state in (JobState.PAUSED, JobState.CANCELLED)
        assert driver.machine.state.incidents == {}


def test_ranks_that_lost_each_other_blame_no_node() -> None:
    driver = Driver().running(spares=0)
    lost_peer(driver, 0)
    lost_peer(driver, 1)
    driver.answer_all("/stop/")
    incident = driver.incident()
    assert (incident.action, incident.culprits) == (Action.RESTART_IN_PLACE, ())
    assert "what failed first is not known" in incident.reason
    assert [driver.node(node).state for node in ("n1", "n2")] == [NodeState.ASSIGNED] * 2


def test_ranks_that_lose_each_other_again_have_all_nodes_checked() -> None:
    driver = Driver().running(spares=0)
    for _ in range(2):
        lost_peer(driver, 0)
        driver.answer_all("/stop/")
        driver.answer_all("/start/")
        driver.now_s += 100.0
    assert driver.job().state is JobState.DIAGNOSING
    assert driver.incident(2).culprits == ()


def rejoin(driver: Driver, node: str, incarnation: str, port: int) -> list[str]:
    return driver.send(
        NodeJoined(
            node=NodeId(node),
            incarnation=incarnation,
            address=f"{node}.example",
            rendezvous_port=port,
            workers=1,
            statuses=(),
        )
    )


def test_a_start_for_an_agent_that_is_gone_is_made_again_with_the_present_one() -> None:
    """The order named the port of the dead agent: the attempt was lost, and a node suspected."""
    driver = Driver().starting(spares=0)
    lines = rejoin(driver, "n1", "two", 5151)
    assert "send job/a1/start/n1" not in lines
    driver.send(driver.exited(1, code=1, fault_class="cascade", detail="DistStoreError"))
    driver.answer_all("/stop/")
    job, incident = driver.job(), driver.incident()
    assert (job.state, job.attempt) == (JobState.STARTING, 2)
    assert driver.machine.state.attempts[job.job_id].rendezvous_port == 5151
    assert incident.culprits == ()
    assert "restarted before its workers had started" in incident.reason
    assert [driver.node(node).state for node in ("n1", "n2")] == [NodeState.ASSIGNED] * 2


def test_starts_that_end_their_agent_each_time_end_with_the_retry_budget() -> None:
    driver = Driver().starting(spares=0, retry_budget=2)
    for number in range(3):
        rejoin(driver, "n1", f"agent {number}", 5151)
        driver.answer_all("/stop/")
    assert driver.job().state is JobState.FAILED
    assert "the retry budget is spent" in driver.job().reason


def test_agents_restarted_while_nodes_are_checked_start_with_their_new_ports() -> None:
    driver = Driver().running(spares=0, in_place_restarts=0)
    driver.send(driver.exited(1))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING
    for node in ("n1", "n2"):
        driver.send(NodeDisconnected(node=NodeId(node)))
    rejoin(driver, "n2", "two", 6161)
    driver.searched()
    assert driver.job().state is not JobState.STARTING, "n1 is not here yet"
    rejoin(driver, "n1", "two", 5151)
    assert driver.job().state is JobState.STARTING
    assert driver.machine.state.attempts[driver.job().job_id].rendezvous_port == 5151


@pytest.mark.parametrize(
    ("first", "is_replaced"), [("nccl", True), ("killed_by_signal", False), ("oom_host", False)]
)
def test_a_node_is_replaced_unseen_only_for_three_faults_such_as_machines_make(
    first: str, is_replaced: bool
) -> None:
    driver = Driver().running(retry_budget=9, in_place_restarts=9)
    for fault_class in (first, first, "nccl"):
        driver.send(driver.exited(0, code=1, fault_class=fault_class))
        driver.answer_all("/stop/")
        if driver.job().state is JobState.DIAGNOSING:
            driver.searched()
        driver.answer_all("/start/")
        driver.advanced(1)
        driver.now_s += 10.0
    assert (N1 not in driver.job().nodes) is is_replaced
