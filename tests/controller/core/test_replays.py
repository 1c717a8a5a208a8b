"""A step with a non-finite loss: done again first, and what follows from either outcome."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core import events as ev
from controller.core.changes import fold
from controller.core.effects import Persist, SendCommand
from controller.core.kinds import Action, Cause, NonFiniteAgain, Rung
from controller.core.node_events import NodeFound
from controller.core.states import IncidentState, JobState, NodeState
from outlast.failures import ErrorKind
from outlast.ids import NodeId
from outlast.skipped import StepRange
from tests.controller.core.driver import JOB, Driver

FULL = (Rung.RESTART, Rung.DIAGNOSE, Rung.REPLACE)


def no_number(driver: Driver, step: int, rank: int = 0, **changes: object) -> list[str]:
    """A rank's loss of this step is not a number, and its job's workers are stopped."""
    values: dict[str, object] = {
        "code": 1,
        "fault_class": "non_finite",
        "fingerprint": "no number",
        "detail": f"NonFiniteLossError: step {step}: loss nan",
        "completed_step": step - 1,
    }
    driver.send(driver.exited(rank, **{**values, **changes}))
    return driver.answer_all("/stop/")


def restarted(driver: Driver, step: int) -> None:
    """The next attempt's workers have started and completed `step` first."""
    driver.answer_all("/start/")
    driver.advanced(step, resumed_step=step - 1)


def told(driver: Driver) -> tuple[StepRange, ...]:
    """What the workers of the newest attempt are told to leave out."""
    return driver.machine.state.attempts[JOB].skipped


def test_the_first_time_the_step_is_done_again_in_place() -> None:
    driver = Driver().running()
    no_number(driver, 7)
    incident = driver.incident()
    assert (incident.action, incident.cause) == (Action.RESTART_IN_PLACE, Cause.NON_FINITE)
    assert driver.job().replayed_step == 7
    assert driver.job().skipped == ()


def test_a_step_that_reproduces_is_left_out_by_every_later_attempt() -> None:
    driver = Driver().running()
    no_number(driver, 7)
    driver.answer_all("/start/")
    no_number(driver, 7)
    incident = driver.incident(2)
    assert (incident.action, incident.cause) == (Action.SKIP_BATCH, Cause.NON_FINITE)
    assert "the batch of step 7 is left out" in incident.reason
    assert incident.culprits == ()
    assert driver.job().skipped == (StepRange(first=7, last=7),)
    assert told(driver) == driver.job().skipped

    restarted(driver, 7)
    assert driver.incident(2).state is IncidentState.CLOSED
    assert driver.job().replayed_step is None
    # That it was passed says nothing about a node: it was not computed.
    assert driver.job().unreproduced == ()
    driver.send(driver.exited(1, completed_step=20))
    driver.answer_all("/stop/")
    driver.searched()
    assert told(driver) == driver.job().skipped


def test_what_is_left_out_is_in_the_journal_before_workers_hear_of_it() -> None:
    driver = Driver().running()
    no_number(driver, 7)
    driver.answer_all("/start/")
    driver.send(driver.exited(0, code=1, fault_class="non_finite", completed_step=6))
    *first, last = [name for name in driver.machine.state.commands if "/stop/" in name]
    for name in first:
        driver.answer(name)
    record = driver.machine.state.commands[last]
    batch = driver.machine.handle(
        ev.CommandFinished(
            command_id=last,
            node=record.node,
            ok=True,
            error_kind=ErrorKind.NONE,
            detail="",
            completed_step=6,
        ),
        driver.now_s,
    )
    assert isinstance(batch[0], Persist)
    starts = [effect.start for effect in batch if isinstance(effect, SendCommand)]
    skipped = [None if start is None else start.attempt.skipped for start in starts]
    assert skipped == [driver.job().skipped] * 2
    assert fold(driver.machine.state.as_changes()).jobs[JOB].skipped == driver.job().skipped


def test_a_rollback_leaves_out_the_steps_before_as_well() -> None:
    driver = Driver().running(
        non_finite_again=NonFiniteAgain.ROLLBACK, rollback_steps=5, total_steps=100
    )
    no_number(driver, 20)
    driver.answer_all("/start/")
    no_number(driver, 20)
    incident = driver.incident(2)
    assert incident.action is Action.ROLL_BACK
    assert "going back to the weights after step 15" in incident.reason
    assert driver.job().skipped == (StepRange(first=16, last=20),)
    # It is over when training is past the step, not when it is back at an older one.
    driver.answer_all("/start/")
    driver.advanced(11, resumed_step=10)
    assert driver.incident(2).state is IncidentState.VERIFYING
    driver.advanced(20, resumed_step=10)
    assert driver.incident(2).state is IncidentState.CLOSED


def test_a_rollback_longer_than_the_run_begins_anew() -> None:
    driver = Driver().running(non_finite_again=NonFiniteAgain.ROLLBACK, rollback_steps=50)
    for _ in range(2):
        no_number(driver, 7)
        driver.answer_all("/start/")
    assert driver.job().skipped == (StepRange(first=1, last=7),)


def test_three_bad_steps_in_a_row_are_not_the_batch() -> None:
    driver = Driver().running(retry_budget=20, in_place_restarts=20)
    for step in (7, 8):
        no_number(driver, step)
        driver.answer_all("/start/")
        no_number(driver, step)
        restarted(driver, step)
    no_number(driver, 9)
    driver.answer_all("/start/")
    no_number(driver, 9, traceback="Traceback")
    job = driver.job()
    assert job.state is JobState.FAILED
    assert "it is not the batch" in job.reason
    assert job.error == "Traceback"
    assert [str(each) for each in job.skipped] == ["7", "8"]


def test_bad_steps_with_training_in_between_are_left_out_one_by_one() -> None:
    driver = Driver().running(retry_budget=20, in_place_restarts=20)
    for step in (7, 9, 11, 13):
        no_number(driver, step)
        driver.answer_all("/start/")
        no_number(driver, step)
        restarted(driver, step)
    assert driver.job().state is JobState.RUNNING
    assert [each.last for each in driver.job().skipped] == [7, 9, 11, 13]


def test_a_job_may_rather_fail() -> None:
    driver = Driver().running(non_finite_again=NonFiniteAgain.FAIL)
    no_number(driver, 7)
    driver.answer_all("/start/")
    no_number(driver, 7)
    assert driver.job().state is JobState.DIAGNOSING
    driver.searched()
    driver.answer_all("/start/")
    no_number(driver, 7)
    assert driver.job().state is JobState.FAILED
    assert driver.job().skipped == ()


def test_a_budget_that_is_spent_leaves_nothing_out() -> None:
    driver = Driver().running(retry_budget=1)
    no_number(driver, 7)
    driver.answer_all("/start/")
    no_number(driver, 7)
    assert driver.job().state is JobState.FAILED
    assert "retry budget is spent" in driver.job().reason


def test_a_ladder_that_always_checks_does_so_before_anything_is_left_out() -> None:
    driver = Driver().running(ladder=(Rung.DIAGNOSE, Rung.REPLACE))
    for number in (1, 2):
        no_number(driver, 7)
        assert driver.job().state is JobState.DIAGNOSING
        driver.searched()
        driver.answer_all("/start/")
        assert len(driver.job().skipped) == number - 1


def test_a_fault_in_between_does_not_hide_that_a_step_reproduces() -> None:
    driver = Driver().running()
    no_number(driver, 7)
    driver.answer_all("/start/")
    driver.send(driver.exited(1, completed_step=6))
    driver.answer_all("/stop/")
    driver.searched()
    driver.answer_all("/start/")
    no_number(driver, 7)
    assert driver.job().skipped == (StepRange(first=7, last=7),)


def test_a_step_that_does_not_reproduce_names_the_node() -> None:
    driver = Driver().running()
    no_number(driver, 7, rank=1)
    restarted(driver, 7)
    assert driver.job().unreproduced == ("n2",)
    (note,) = [entry for entry in driver.incident().timeline if entry.phase == "replayed"]
    assert "it did not reproduce" in note.detail
    assert "n2 is suspected" in note.detail
    assert driver.incident().state is IncidentState.CLOSED


def test_nothing_is_said_before_the_step_is_passed() -> None:
    """Host memory was lost with it: training goes on further back."""
    driver = Driver().running()
    no_number(driver, 7)
    driver.answer_all("/start/")
    driver.advanced(5, resumed_step=4)
    assert driver.job().replayed_step == 7
    driver.advanced(6, resumed_step=4)
    assert driver.incident().state is IncidentState.VERIFYING
    driver.advanced(7, resumed_step=4)
    assert driver.job().unreproduced == ("n1",)


@pytest.mark.parametrize("fault_class", ["non_finite_gradient", "non_finite"])
def test_where_a_model_lies_on_several_nodes_or_only_the_gradient_is_bad_no_node_is_named(
    fault_class: str,
) -> None:
    driver = Driver().running(pp=2 if fault_class == "non_finite" else 1)
    no_number(driver, 7, fault_class=fault_class)
    restarted(driver, 7)
    (note,) = [entry for entry in driver.incident().timeline if entry.phase == "replayed"]
    if fault_class == "non_finite":
        assert "one of n1, n2 is suspected" in note.detail
    else:
        assert "which one is not known" in note.detail
        assert driver.job().unreproduced == ()


def test_a_gradient_is_its_own_rank_s_alone_and_anyone_s_is_nobody_s() -> None:
    driver = Driver().running(pp=2)
    no_number(driver, 7, rank=1, fault_class="non_finite_own_gradient")
    assert driver.incident().culprits == ("n2",)
    restarted(driver, 7)
    assert driver.job().unreproduced == ("n2",)

    driver = Driver().running()
    no_number(driver, 7, rank=1, fault_class="non_finite_gradient")
    assert driver.incident().culprits == ()
    assert driver.incident().action is Action.RESTART_IN_PLACE


def test_a_ladder_that_always_checks_does_so_for_nobody_s_gradient_too() -> None:
    driver = Driver().running(ladder=(Rung.DIAGNOSE, Rung.REPLACE))
    no_number(driver, 7, fault_class="non_finite_gradient")
    assert driver.job().state is JobState.DIAGNOSING


def twice_on_node_2(driver: Driver) -> None:
    """A step that did not reproduce, and a day later another one on the same node."""
    no_number(driver, 7, rank=1)
    restarted(driver, 7)
    driver.commit(8)
    driver.now_s += 86_400.0
    no_number(driver, 30, rank=1)


def test_the_second_time_bits_are_compared_and_the_node_is_replaced() -> None:
    driver = Driver().running()
    twice_on_node_2(driver)
    assert driver.job().state is JobState.DIAGNOSING
    assert "compared bit for bit" in driver.job().reason
    driver.searched()
    incident = driver.incident(2)
    assert (incident.action, incident.cause) == (Action.REPLACE_NODES, Cause.SILENT_CORRUPTION)
    assert incident.culprits == ("n2",)
    assert driver.job().nodes == ("n1", "n3")
    assert driver.node("n2").state in (NodeState.QUARANTINED, NodeState.DRAINED)
    assert driver.job().unreproduced == ()
    # The replacement does the step again: another computer, and the same bits if it was data.
    assert driver.job().replayed_step == 30


def test_without_another_node_the_suspect_is_kept() -> None:
    driver = Driver().running(spares=0)
    twice_on_node_2(driver)
    driver.searched()
    assert driver.job().state is JobState.STARTING
    assert driver.incident(2).action is Action.RESTART_IN_PLACE


def test_a_ladder_without_checks_replaces_at_once() -> None:
    driver = Driver().running(ladder=(Rung.RESTART, Rung.REPLACE))
    twice_on_node_2(driver)
    assert driver.incident(2).cause is Cause.SILENT_CORRUPTION
    assert driver.job().nodes == ("n1", "n3")


def test_of_several_suspects_none_is_replaced_unproved() -> None:
    driver = Driver().running(pp=2)
    twice_on_node_2(driver)
    driver.searched()
    assert driver.incident(2).action is Action.RESTART_IN_PLACE


def test_wrong_bits_in_a_check_are_silent_corruption() -> None:
    driver = Driver().running(ladder=FULL[1:])
    no_number(driver, 7, rank=1)
    assert driver.job().state is JobState.DIAGNOSING
    event = ev.FaultsSearched(
        search=f"{driver.job().incident}.d1",
        job_id=JOB,
        nodes=(
            NodeFound(node=NodeId("n1"), verdict="pass", detail=""),
            replace(
                NodeFound(node=NodeId("n2"), verdict="fail", detail="differs"), is_corrupt=True
            ),
        ),
        links=(),
    )
    driver.send(event)
    incident = driver.incident()
    assert (incident.cause, incident.culprits) == (Cause.SILENT_CORRUPTION, ("n2",))
    assert "silent corruption: n2 computed other bits" in incident.reason


def other_bits(driver: Driver, step: int, rank: int = 1, fault_class: str = "corrupt") -> None:
    """Two replicas have computed this step, and their bits differ."""
    message = "this replica" if fault_class == "corrupt" else "one of the replicas"
    no_number(
        driver,
        step,
        rank,
        fault_class=fault_class,
        fingerprint="other bits",
        detail=f"SilentCorruptionError: step {step}: {message} computed other bits",
    )


def test_the_workers_are_told_which_step_to_compare_and_who_is_suspected() -> None:
    driver = Driver().running()
    assert driver.machine.state.attempts[JOB].replayed_step is None
    no_number(driver, 7, rank=1)
    attempt = driver.machine.state.attempts[JOB]
    assert (attempt.replayed_step, attempt.suspects) == (7, ("n2",))
    restarted(driver, 7)
    driver.send(driver.exited(1, completed_step=20))
    driver.answer_all("/stop/")
    driver.searched()
    assert driver.machine.state.attempts[JOB].replayed_step is None


def test_a_node_whose_bits_differ_is_replaced_at_once() -> None:
    driver = Driver().running()
    no_number(driver, 7, rank=1)
    driver.answer_all("/start/")
    other_bits(driver, 7)
    incident = driver.incident(2)
    assert (incident.action, incident.cause) == (Action.REPLACE_NODES, Cause.SILENT_CORRUPTION)
    assert incident.culprits == ("n2",)
    assert "done again by two replicas, and their bits differ" in incident.reason
    assert driver.job().nodes == ("n1", "n3")
    driver.answer_all("/suite/")
    # Whoever takes its place is compared, too.
    assert driver.machine.state.attempts[JOB].replayed_step == 7
    restarted(driver, 7)
    assert driver.job().skipped == ()
    assert driver.job().replayed_step is None
    (note,) = [entry for entry in driver.incident(2).timeline if entry.phase == "replayed"]
    assert "n2 had a part in it, and the job has left it" in note.detail


def test_bits_that_are_never_the_same_do_not_use_up_all_nodes() -> None:
    driver = Driver().running(retry_budget=2, spares=5)
    no_number(driver, 7, rank=1)
    driver.answer_all("/start/")
    other_bits(driver, 7)
    driver.answer_all("/suite/")
    driver.answer_all("/start/")
    other_bits(driver, 7)
    assert driver.job().state is JobState.FAILED
    assert "retry budget is spent" in driver.job().reason
    assert driver.node("n3").state is not NodeState.QUARANTINED


def test_where_two_cannot_be_told_apart_all_nodes_are_checked_first() -> None:
    driver = Driver().running()
    no_number(driver, 7, fault_class="non_finite_gradient")
    driver.answer_all("/start/")
    other_bits(driver, 7, fault_class="corrupt_somewhere")
    assert driver.job().state is JobState.DIAGNOSING
    assert "compared bit for bit" in driver.job().reason
    driver.searched()
    incident = driver.incident(2)
    # Nothing was found: it is compared again.
    assert (incident.action, incident.cause) == (Action.RESTART_IN_PLACE, Cause.SILENT_CORRUPTION)
    assert incident.culprits == ()
    assert driver.machine.state.attempts[JOB].replayed_step == 7


def test_two_that_are_never_told_apart_end_the_job_with_their_names() -> None:
    driver = Driver().running()
    no_number(driver, 7, fault_class="non_finite_gradient")
    for _ in range(3):
        driver.answer_all("/start/")
        other_bits(driver, 7, fault_class="corrupt_somewhere")
        driver.searched()
    assert driver.job().state is JobState.FAILED
    assert "one of the replicas computed other bits" in driver.job().error


def test_of_a_replica_on_several_nodes_all_are_replaced_when_checks_find_nothing() -> None:
    """The least that is known to hold the wrong one."""
    driver = Driver().running(pp=2, spares=2)
    no_number(driver, 7)
    driver.answer_all("/start/")
    other_bits(driver, 7)
    assert driver.job().state is JobState.DIAGNOSING
    driver.searched()
    incident = driver.incident(2)
    assert (incident.action, incident.culprits) == (Action.REPLACE_NODES, ("n1", "n2"))
    assert "one of n1, n2 is wrong" in incident.reason


def test_of_a_replica_on_several_nodes_none_is_replaced_where_too_few_are_free() -> None:
    driver = Driver().running(pp=2, spares=1)
    no_number(driver, 7)
    driver.answer_all("/start/")
    other_bits(driver, 7)
    driver.searched()
    assert driver.incident(2).action is Action.RESTART_IN_PLACE
