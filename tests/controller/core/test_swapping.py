"""Standbys that take a place at once, and nodes that are checked away from their job."""

from __future__ import annotations

from controller.core.kinds import Action, Rung
from controller.core.node_events import NodeDisconnected
from controller.core.orders import RunSuite
from controller.core.settings import Settings
from controller.core.states import JobState, NodeState
from outlast.ids import CommandId, NodeId
from tests.controller.core.driver import Driver

# Two nodes, each of which keeps the other one's copies.
COPIES: dict[str, object] = {"standby": 1, "replica_node_indexes": ((1,), (0,))}
ECC = {"fault_class": "device", "detail": "uncorrectable ECC error"}


def trains(**changes: object) -> Driver:
    """A job of two nodes with copies, and a standby that is checked."""
    driver = Driver().running(**{**COPIES, **changes})  # type: ignore[arg-type]
    driver.answer_all("/suite/")
    assert driver.node("n3").state is NodeState.STANDBY
    return driver


def broken(driver: Driver, **changes: object) -> list[str]:
    """Rank 0's device reports a fault, and all workers stop."""
    driver.advanced(driver.job().high_step + 20)
    driver.send(driver.exited(0, **{**ECC, **changes}))
    return driver.answer_all("/stop/")


def test_a_checked_standby_takes_a_lost_nodes_place_at_once() -> None:
    driver = trains()
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().nodes == ("n3", "n2")
    assert driver.job().state is JobState.STARTING


def test_a_standby_whose_checks_were_long_ago_is_checked_before_use() -> None:
    driver = trains()
    # It is out of reach when the next check is due.
    driver.send(NodeDisconnected(node=NodeId("n3")))
    driver.wait(Settings().standby_recheck_s + 1.0)
    driver.join("n3")
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PREFLIGHT


def test_a_standby_is_checked_again_every_hour_and_stays_one() -> None:
    driver = trains()
    before = driver.node("n3").num_suites
    lines = driver.wait(Settings().standby_recheck_s + 1.0)
    assert driver.node("n3").num_suites == before + 1, lines
    driver.answer_all("/suite/")
    assert driver.node("n3").state is NodeState.STANDBY
    assert driver.node("n3").checked_s == driver.now_s


def test_a_standby_that_fails_its_check_is_one_no_more() -> None:
    driver = trains()
    driver.wait(Settings().standby_recheck_s + 1.0)
    (suite,) = (each for each in driver.machine.state.commands if "/suite/" in each)
    driver.answer(suite, verdict="fail")
    assert driver.node("n3").state in (NodeState.QUARANTINED, NodeState.DRAINED)


def test_a_standby_is_checked_with_the_storage_of_the_job_that_it_is_for() -> None:
    driver = trains()
    assert driver.node("n3").checked_storage == driver.job().checkpoint_url != ""


def test_a_free_node_that_is_no_standby_is_checked_before_use() -> None:
    driver = Driver().running(spares=1, standby=0)
    assert driver.node("n3").state is NodeState.READY
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PREFLIGHT


def test_a_node_whose_device_reports_a_fault_is_checked_while_the_job_goes_on() -> None:
    driver = trains()
    lines = broken(driver)
    assert driver.job().state is JobState.STARTING
    assert driver.job().nodes == ("n3", "n2")
    incident = driver.incident()
    assert incident.action is Action.SWAP_NODES
    assert "a checked standby takes the place of n1, checked meanwhile" in incident.reason
    assert driver.node("n1").state is NodeState.VALIDATING
    assert driver.node("n1").job is None
    (suite,) = (line.split()[1] for line in lines if line.startswith("open n1/suite/"))
    order = driver.machine.state.commands[CommandId(suite)].command
    assert isinstance(order, RunSuite)
    assert order.suite == "on-failure"
    assert driver.job().retry_left == 2


def test_a_suspect_that_passes_is_a_standby_again() -> None:
    driver = trains()
    broken(driver)
    for _ in range(2):
        assert driver.node("n1").state is NodeState.VALIDATING
        driver.answer_all("n1/suite/")
    # Its last checks did not try the job's storage.
    driver.answer_all("n1/suite/")
    assert driver.node("n1").state is NodeState.STANDBY
    assert driver.node("n1").checked_storage == driver.job().checkpoint_url
    assert driver.node("n1").quarantines_s == ()


def test_a_suspect_that_fails_is_quarantined() -> None:
    driver = trains()
    broken(driver)
    (suite,) = (each for each in driver.machine.state.commands if "n1/suite/" in each)
    driver.answer(suite, verdict="fail", detail="wrong sums")
    node = driver.node("n1")
    assert node.state in (NodeState.QUARANTINED, NodeState.DRAINED)
    assert "failed its checks: wrong sums" in node.reason
    assert node.quarantine


def test_a_suspect_that_fails_while_the_breaker_is_open_is_checked_again_later() -> None:
    driver = trains(spares=2)
    # The one quarantine that a small fleet may have within ten minutes.
    driver.wait(Settings().standby_recheck_s + 1.0)
    (suite,) = (each for each in driver.machine.state.commands if "n3/suite/" in each)
    driver.answer(suite, verdict="fail")
    driver.answer_all("n4/suite/")
    assert driver.node("n4").state is NodeState.STANDBY
    broken(driver)
    (suite,) = (each for each in driver.machine.state.commands if "n1/suite/" in each)
    driver.answer(suite, verdict="fail", detail="wrong sums")
    assert driver.node("n1").state is NodeState.VALIDATING
    driver.wait(Settings().breaker_window_s + 1.0)
    (suite,) = (each for each in driver.machine.state.commands if "n1/suite/" in each)
    driver.answer(suite, verdict="fail", detail="wrong sums")
    assert driver.node("n1").state in (NodeState.QUARANTINED, NodeState.DRAINED)


def test_without_a_copy_elsewhere_the_nodes_are_checked_first() -> None:
    driver = trains(replica_node_indexes=())
    broken(driver)
    assert driver.job().state is JobState.DIAGNOSING


def test_without_a_checked_standby_the_nodes_are_checked_first() -> None:
    driver = trains()
    driver.lose("n3")
    broken(driver)
    assert driver.job().state is JobState.DIAGNOSING


def test_a_ladder_without_the_rung_replace_has_no_swaps() -> None:
    driver = trains(ladder=(Rung.RESTART, Rung.DIAGNOSE))
    broken(driver)
    assert driver.job().state is JobState.DIAGNOSING


def test_the_same_fault_on_the_next_node_without_a_step_between_is_checked_first() -> None:
    """It may be the program's, and follow it from node to node."""
    driver = trains(spares=2, standby=2)
    driver.answer_all("/suite/")
    broken(driver, fingerprint="kernel", fault_class="device_kernel")
    assert driver.job().state is JobState.STARTING
    driver.answer_all("/start/")
    again = driver.exited(0, **{**ECC, "fingerprint": "kernel", "fault_class": "device_kernel"})
    driver.send(again)
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING


def test_a_node_that_was_swapped_twice_in_vain_is_checked_with_all_others() -> None:
    """Two nodes take turns: checks find nothing, and each is the standby of the other."""
    driver = trains()
    for number, suspect in enumerate(("n1", "n3", "n1", "n3"), start=1):
        broken(driver)
        assert driver.node(suspect).state is NodeState.VALIDATING
        driver.answer_all("/start/")
        for _ in range(3):
            driver.answer_all(f"{suspect}/suite/")
        driver.commit(10 * number)
    broken(driver)
    assert driver.job().nodes[0] == "n1"
    assert driver.job().state is JobState.DIAGNOSING
