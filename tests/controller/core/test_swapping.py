"""Standbys that take a place at once, and nodes that are checked away from their job."""

from __future__ import annotations

from controller.core import events as ev
from controller.core.kinds import Action, Cause, Rung
from controller.core.node_events import NodeDrainRequested, NodeLate, NodeUncordonRequested
from controller.core.orders import RunSuite
from controller.core.settings import Settings
from controller.core.states import JobState, NodeState
from outlast.ids import CommandId, NodeId
from tests.controller.core.driver import JOB, Driver

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


def suite_of(driver: Driver, node: str) -> str:
    """The one suite that a node runs."""
    (suite,) = (each for each in driver.machine.state.commands if f"{node}/suite/" in each)
    return suite


def test_a_checked_standby_takes_a_lost_nodes_place_at_once() -> None:
    driver = trains()
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().nodes == ("n3", "n2")
    assert driver.job().state is JobState.STARTING


def test_a_standby_whose_checks_were_long_ago_is_checked_before_use() -> None:
    driver = trains()
    # Its next check does not end.
    driver.wait(Settings().standby_recheck_s + Settings().fleet_check_timeout_s + 1.0)
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
    driver.answer(suite_of(driver, "n3"), verdict="fail")
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
    driver.answer(suite_of(driver, "n1"), verdict="fail", detail="wrong sums")
    node = driver.node("n1")
    assert node.state in (NodeState.QUARANTINED, NodeState.DRAINED)
    assert "failed its checks: wrong sums" in node.reason
    assert node.quarantine


def test_a_suspect_that_fails_while_the_breaker_is_open_is_quarantined_later() -> None:
    driver = trains(spares=2)
    # The one quarantine that a small fleet may have within ten minutes.
    driver.wait(Settings().standby_recheck_s + 1.0)
    driver.answer(suite_of(driver, "n3"), verdict="fail")
    driver.answer_all("n4/suite/")
    assert driver.node("n4").state is NodeState.STANDBY
    broken(driver)
    driver.answer(suite_of(driver, "n1"), verdict="fail", detail="wrong sums")
    assert driver.node("n1").state is NodeState.VALIDATING
    driver.wait(Settings().breaker_window_s + 1.0)
    assert driver.node("n1").state in (NodeState.QUARANTINED, NodeState.DRAINED)
    assert "wrong sums" in driver.node("n1").reason


def test_what_came_of_a_suspects_checks_is_in_its_incident() -> None:
    driver = trains()
    broken(driver)
    assert "alert" in driver.answer(suite_of(driver, "n1"), verdict="fail", detail="wrong sums")
    assert driver.incident().findings == ()
    assert driver.incident().timeline[-1].detail == "n1: fail: wrong sums"


def test_a_suspect_that_falls_silent_is_quarantined_and_not_given_up() -> None:
    driver = trains()
    broken(driver)
    driver.lose("n1", gone=False)
    assert driver.node("n1").state is NodeState.QUARANTINED


def test_a_person_may_drain_a_suspect() -> None:
    driver = trains()
    broken(driver)
    driver.send(NodeDrainRequested(node=NodeId("n1")))
    assert driver.node("n1").state is NodeState.DRAINED
    assert not [each for each in driver.machine.state.commands if "n1/suite/" in each]


def test_a_node_that_has_just_come_has_no_copies_yet() -> None:
    """Else a second swap would lose what only the suspect has in memory."""
    driver = trains(spares=2, standby=2)
    driver.answer_all("/suite/")
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.STARTING
    driver.answer_all("/start/")
    driver.advanced(11, resumed_step=10)
    driver.send(driver.exited(1, **ECC, completed_step=12))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING


def test_the_second_fault_of_a_connection_on_one_node_is_of_this_one() -> None:
    """As where a GPU breaks and only its collective library says so."""
    driver = trains()
    driver.advanced(30)
    nccl = {"fault_class": "nccl", "detail": "unhandled system error", "fingerprint": "nccl"}
    driver.send(driver.exited(0, **nccl, completed_step=30))
    driver.answer_all("/stop/")
    assert driver.incident(1).action is Action.RESTART_IN_PLACE
    assert driver.node("n1").state is NodeState.SUSPECT
    # Before any step: the other node has kept what it had.
    driver.answer_all("/start/")
    driver.send(driver.exited(0, **nccl, completed_step=-1))
    driver.answer_all("/stop/")
    assert driver.incident(2).action is Action.SWAP_NODES
    assert driver.job().nodes == ("n3", "n2")
    assert driver.job().state is JobState.STARTING


def test_how_far_an_earlier_attempt_came_says_nothing_of_copies() -> None:
    """The job went back from step 100, did one step with a new node, and was paused."""
    driver = trains()
    driver.lose("n1")
    (stop,) = (each for each in driver.machine.state.commands if "/stop/n2" in each)
    driver.answer(stop, completed_step=100)
    driver.answer_all("/start/")
    driver.advanced(51, resumed_step=50)
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.answer_all("/stop/")
    driver.send(ev.JobResumeRequested(job_id=JOB))
    driver.answer_all("/suite/")
    attempt = driver.machine.state.attempts[JOB]
    assert (attempt.attempt, attempt.nodes) == (3, ("n3", "n2"))
    assert "n3" in attempt.new_nodes


def test_a_connection_that_is_lost_once_names_no_node() -> None:
    driver = trains(in_place_restarts=0)
    driver.advanced(30)
    driver.send(driver.exited(0, fault_class="nccl", completed_step=30))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING


def test_a_holder_that_is_not_heard_keeps_nothing_for_sure() -> None:
    driver = trains()
    driver.advanced(30)
    driver.send(NodeLate(node=NodeId("n2"), silent_s=6.0))
    driver.send(driver.exited(0, **ECC))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING


def test_a_detector_that_speaks_against_another_node_has_all_of_them_checked() -> None:
    driver = trains()
    driver.advanced(30)
    driver.send(
        ev.Detected(
            job_id=JOB,
            attempt=driver.attempt(),
            cause=Cause.STRAGGLER,
            node=NodeId("n1"),
            rank=0,
            detail="slow",
            at_s=driver.now_s,
            acts=True,
        )
    )
    driver.send(driver.exited(1, **ECC))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING


def test_what_a_job_has_used_is_checked_before_it_is_a_standby() -> None:
    driver = trains()
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert driver.node("n1").state is NodeState.READY
    assert driver.node("n1").checked_s is None


def test_a_suspect_that_failed_is_checked_again_when_a_person_returns_it() -> None:
    driver = trains()
    broken(driver)
    driver.answer(suite_of(driver, "n1"), verdict="fail")
    driver.send(NodeUncordonRequested(node=NodeId("n1")))
    assert driver.node("n1").state is NodeState.READY
    assert suite_of(driver, "n1")


def test_a_standby_whose_agent_was_started_anew_is_checked_again() -> None:
    driver = trains()
    driver.join("n3", incarnation="two")
    assert driver.node("n3").checked_s is None
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PREFLIGHT


def test_a_place_goes_to_the_standby_that_needs_no_check() -> None:
    driver = trains(spares=2, standby=2)
    driver.answer_all("/suite/")
    driver.join("n3", incarnation="two")
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().nodes == ("n4", "n2")
    assert driver.job().state is JobState.STARTING


def test_a_standby_is_ready_while_its_next_check_runs_which_ends_where_a_job_takes_it() -> None:
    driver = trains()
    driver.wait(Settings().standby_recheck_s + 1.0)
    suite = suite_of(driver, "n3")
    driver.lose("n1")
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.STARTING
    assert suite not in driver.machine.state.commands


def test_a_standby_that_fails_while_the_breaker_is_open_waits_for_a_person() -> None:
    """Else it would be checked again and again."""
    driver = trains(spares=2, standby=2)
    driver.answer_all("/suite/")
    driver.wait(Settings().standby_recheck_s + 1.0)
    for node in ("n3", "n4"):
        driver.answer(suite_of(driver, node), verdict="fail")
    assert driver.node("n3").state in (NodeState.QUARANTINED, NodeState.DRAINED)
    assert driver.node("n4").cordoned
    assert not [each for each in driver.machine.state.commands if "/suite/" in each]


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
