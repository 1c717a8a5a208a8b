"""Agents that are stopped in order: no incident, no suspicion, no check, no retry."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core import leaving
from controller.core.changes import fold
from controller.core.kinds import Cause, EvidenceKind, Rung
from controller.core.node_events import (
    NodeCordonRequested,
    NodeDisconnected,
    NodeJoined,
    NodeLate,
    NodeLeft,
    NodeLost,
    NodeSilent,
)
from controller.core.states import IncidentState, JobState, NodeState
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver

N1, N2, N3 = NodeId("n1"), NodeId("n2"), NodeId("n3")


def leave(driver: Driver, node: str) -> list[str]:
    """The agent that is on the node now says that it ends, and ends."""
    return driver.send(NodeLeft(node=NodeId(node), incarnation=driver.node(node).incarnation))


def disconnect(driver: Driver, node: str) -> list[str]:
    return driver.send(NodeDisconnected(node=NodeId(node)))


def join(driver: Driver, node: str, incarnation: str, predecessor: str = "") -> list[str]:
    return driver.send(
        NodeJoined(
            node=NodeId(node),
            incarnation=incarnation,
            address=f"{node}.example",
            rendezvous_port=4242,
            workers=1,
            statuses=(),
            predecessor=predecessor,
        )
    )


def restarted(before: Driver, away_s: float = 60.0) -> Driver:
    """The controller ends and comes back on its journal."""
    after = Driver(fold(before.machine.state.as_changes()))
    after.now_s = before.now_s + away_s
    after.send(ev.ControllerStarted(term=2))
    return after


def assert_untouched(driver: Driver, retries: int = 3) -> None:
    assert driver.machine.state.incidents == {}
    assert {node.state for node in driver.machine.state.nodes.values()} == {NodeState.ASSIGNED}
    assert driver.job().retry_left == retries


@pytest.mark.parametrize("who_is_first", ["agents", "controller"])
def test_ten_planned_stops_in_a_row_leave_no_trace(who_is_first: str) -> None:
    driver = Driver().running(spares=0)
    for number in range(10):
        agents = dict.fromkeys(("n1", "n2"), f"agent {number}")
        before = {node: driver.node(node).incarnation for node in agents}
        if who_is_first == "agents":
            for node in agents:
                leave(driver, node)
                disconnect(driver, node)
            assert driver.job().state is JobState.PROVISIONING
        driver = restarted(driver)
        for node, incarnation in agents.items():
            join(driver, node, incarnation, predecessor=before[node])
        assert not [each for each in driver.machine.state.commands if "suite" in each]
        driver.answer_all("/stop/")
        assert (driver.job().state, driver.job().attempt) == (JobState.STARTING, number + 2)
        driver.answer_all("/start/")
        driver.advanced(number + 2)
        assert_untouched(driver)


def _stop_again(driver: Driver, number: int, *, is_ours: bool = False) -> list[str]:
    """The agent of n1 is stopped in order and comes back, and the job trains on."""
    driver.now_s += 60.0
    node = driver.node("n1")
    said = driver.send(NodeLeft(node=node.node, incarnation=node.incarnation, is_ours=is_ours))
    disconnect(driver, "n1")
    driver.answer_all("/stop/")
    join(driver, "n1", f"again {number}")
    driver.answer_all("/start/")
    driver.advanced(number)
    assert driver.job().state is JobState.RUNNING
    return [line for line in said if line.startswith("alert")]


def test_agent_that_is_stopped_again_and_again_under_a_job_is_named_and_not_blamed() -> None:
    driver = Driver().running(spares=0)
    alerts = [_stop_again(driver, number) for number in range(2, 6)]
    assert [len(each) for each in alerts] == [0, 0, 1, 0]
    assert "4 times within the hour" in leaving.note(driver.node("n1"), driver.now_s)
    assert leaving.note(driver.node("n2"), driver.now_s) == ""
    assert_untouched(driver)
    # As it goes on, and is over an hour after.
    assert fold(driver.machine.state.as_changes()) == driver.machine.state
    assert leaving.note(driver.node("n1"), driver.now_s + leaving.STOPS_WINDOW_S) == ""


def test_stops_that_were_announced_are_not_counted() -> None:
    driver = Driver().running(spares=0)
    for number in range(2, 6):
        assert _stop_again(driver, number, is_ours=True) == []
    driver.send(NodeCordonRequested(node=N1))
    for number in range(6, 10):
        assert _stop_again(driver, number) == []
    assert driver.node("n1").stops_s == ()
    assert_untouched(driver)


def test_an_agent_that_leaves_stops_the_others_and_the_job_waits_for_it() -> None:
    driver = Driver().running(spares=0)
    assert leave(driver, "n1") == [
        "job SUSPENDING a1",
        "open job/a1/stop/n2",
        "send job/a1/stop/n2",
    ]
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PROVISIONING
    assert driver.job().reason == "waiting for the agent of n1 to connect"
    disconnect(driver, "n1")
    assert "open job/a2/start/n1" in join(driver, "n1", "two")
    assert_untouched(driver)


def test_peers_that_lose_their_connections_to_it_are_no_fault_before_or_after() -> None:
    driver = Driver().running(spares=0)
    driver.send(driver.exited(1, code=1, fault_class="cascade", detail="connection closed"))
    disconnect(driver, "n1")
    join(driver, "n1", "two", predecessor="one")
    driver.answer_all("/stop/")
    incident = driver.incident()
    assert (incident.cause, incident.culprits) == (Cause.NODE_LEFT, ())
    assert "the agent of n1 was stopped in order: no fault" in incident.reason
    assert (driver.job().attempt, driver.job().retry_left) == (2, 3)
    assert driver.node("n1").state is NodeState.ASSIGNED
    driver = Driver().running(spares=0)
    leave(driver, "n1")
    driver.send(driver.exited(1, code=1, fault_class="cascade", detail="connection closed"))
    driver.answer_all("/stop/")
    assert_untouched(driver)


def test_no_ladder_makes_a_planned_stop_a_reason_to_give_the_job_up() -> None:
    driver = Driver().running(spares=0, ladder=(Rung.REPLACE,))
    driver.send(driver.exited(1, code=1, fault_class="cascade", detail="connection closed"))
    disconnect(driver, "n1")
    join(driver, "n1", "two", predecessor="one")
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.STARTING


def test_a_rank_that_failed_by_itself_is_still_a_fault() -> None:
    driver = Driver().running(spares=0)
    driver.send(driver.exited(1))
    leave(driver, "n1")
    driver.answer_all("/stop/")
    assert driver.incident().culprits == ("n2",)


def test_an_agent_that_dies_after_its_successor_left_in_order_is_a_fault() -> None:
    driver = Driver().running(spares=0)
    leave(driver, "n1")
    driver.answer_all("/stop/")
    join(driver, "n1", "two", predecessor="one")
    driver.answer_all("/start/")
    driver.advanced(11)
    join(driver, "n1", "three", predecessor="one")
    assert driver.incident().state is IncidentState.EVIDENCE


def test_a_node_that_does_not_come_back_is_let_go_and_replaced_without_blame() -> None:
    driver = Driver().running(spares=1)
    leave(driver, "n1")
    driver.answer_all("/stop/")
    driver.lose("n1", gone=False)
    assert driver.node("n1").state is NodeState.RELEASED
    assert driver.node("n1").quarantines_s == ()
    driver.answer_all("/suite/")
    assert driver.job().nodes == ("n3", "n2")
    assert driver.machine.state.incidents == {}


def test_a_free_node_that_was_stopped_in_order_is_not_quarantined() -> None:
    driver = Driver().running(spares=1)
    leave(driver, "n3")
    driver.lose("n3", gone=False)
    assert driver.node("n3").state is NodeState.RELEASED
    join(driver, "n3", "two")
    assert driver.node("n3").state is NodeState.READY


def test_a_stop_in_order_does_not_end_a_quarantine() -> None:
    driver = Driver().running(spares=1)
    driver.lose("n1", gone=False)
    driver.answer_all("/stop/")
    join(driver, "n1", "two")
    leave(driver, "n1")
    driver.lose("n1", gone=False)
    assert driver.node("n1").quarantine


def test_many_agents_that_leave_at_once_do_not_make_the_controller_doubt_itself() -> None:
    driver = Driver()
    for number in range(1, 11):
        driver.join(f"n{number}")
    for number in range(1, 11):
        leave(driver, f"n{number}")
        disconnect(driver, f"n{number}")
    assert not driver.machine.controller_blind


def test_a_preflight_whose_agent_leaves_begins_anew_when_it_is_back() -> None:
    driver = Driver()
    for node in ("n1", "n2"):
        driver.join(node)
    driver.submit()
    driver.answer("n2/suite/1")
    leave(driver, "n1")
    assert driver.job().state is JobState.PROVISIONING
    driver.wait(1000.0)
    join(driver, "n1", "two")
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    assert_untouched(driver)


@pytest.mark.parametrize("fault_class", ["cascade", "killed_by_signal", "nccl"])
def test_cancelling_opens_no_incident_whatever_its_workers_say_meanwhile(fault_class: str) -> None:
    driver = Driver().running(spares=0)
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.send(driver.exited(1, code=1, fault_class=fault_class))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.CANCELLED
    assert driver.machine.state.incidents == {}


def test_a_job_waits_for_the_agents_of_all_its_nodes_before_it_starts_again() -> None:
    """The endpoint of a rendezvous must be that of the agent that is there."""
    driver = Driver().running(spares=0)
    driver.send(driver.exited(1))
    disconnect(driver, "n1")
    driver.answer("job/a1/stop/n2")
    join(driver, "n1", "two")
    disconnect(driver, "n1")
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PROVISIONING
    driver.send(
        NodeJoined(
            node=N1,
            incarnation="three",
            address="n1.example",
            rendezvous_port=5151,
            workers=1,
            statuses=(),
        )
    )
    assert driver.job().state is JobState.STARTING
    assert driver.machine.state.attempts[JOB].rendezvous_port == 5151


def test_a_job_that_waits_for_an_agent_can_be_cancelled() -> None:
    driver = Driver().running(spares=0)
    leave(driver, "n1")
    driver.answer_all("/stop/")
    driver.send(ev.JobCancelRequested(job_id=JOB))
    assert driver.job().state is JobState.CANCELLED


def test_what_ranks_lost_to_a_planned_stop_shortens_no_other_nodes_silence() -> None:
    driver = Driver().running(spares=1, nodes=3)
    driver.send(driver.exited(1, code=1, fault_class="cascade", detail="connection closed"))
    leave(driver, "n1")
    fall_silent(driver, "n3")
    assert lost_nodes(driver) == []
    driver.send(NodeSilent(node=N3, silent_s=60.0))
    assert lost_nodes(driver) == ["n3"]


def test_what_ranks_lost_in_an_earlier_attempt_shortens_no_nodes_silence_now() -> None:
    driver = Driver().running(spares=1, nodes=3, retry_budget=9)
    driver.send(driver.exited(1, code=1, fault_class="cascade", detail="connection closed"))
    driver.answer_all("/stop/")
    driver.answer_all("/start/")
    leave(driver, "n1")
    assert driver.job().state is JobState.SUSPENDING
    fall_silent(driver, "n3")
    assert lost_nodes(driver) == []


def fall_silent(driver: Driver, node: str) -> None:
    """For so long that a node is lost if its peers say so too."""
    disconnect(driver, node)
    driver.send(NodeLate(node=NodeId(node), silent_s=6.0))
    driver.send(NodeLost(node=NodeId(node), silent_s=15.0))


def lost_nodes(driver: Driver) -> list[NodeId | None]:
    return [
        item.node
        for incident in driver.machine.state.incidents.values()
        for item in incident.evidence
        if item.kind is EvidenceKind.NODE_LOST
    ]
