"""Bugs that the simulation found, each as the shortest story that shows it.

The seed is the one that found it at the time; later changes of the world make a
seed tell another story, so the story itself is written down here.
"""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.changes import fold
from controller.core.edge.progress import ProgressTable
from controller.core.kinds import Action
from controller.core.node_events import (
    NodeCordonRequested,
    NodeDisconnected,
    NodeDrainRequested,
    NodeHeard,
    NodeLate,
    NodeSilent,
    NodeUncordonRequested,
    WorkerStatus,
)
from controller.core.settings import Settings
from controller.core.states import IncidentState, JobState, NodeState
from outlast.ids import Attempt, JobId, NodeId
from tests.controller.core.driver import JOB, Driver

SETTINGS = Settings()
N1, N2, N3 = NodeId("n1"), NodeId("n2"), NodeId("n3")


def _restarted(before: Driver, away_s: float) -> Driver:
    """The controller dies and comes back on its journal."""
    after = Driver(fold(before.machine.state.as_changes()))
    after.now_s = before.now_s + away_s
    after.send(ev.ControllerStarted(term=2))
    return after


def test_a_pause_called_off_while_workers_stop_restarts_the_job() -> None:
    """Seeds 5, 12, 18: the machine asserted that a stopping job has an incident."""
    driver = Driver().running()
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.send(ev.JobResumeRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.STARTING
    assert driver.job().attempt == 2


def test_a_pause_called_off_leaves_an_older_incident_alone() -> None:
    """Seed 136: the incident of the last fault, still VERIFYING, was judged again."""
    driver = Driver().running()
    driver.send(driver.exited(0, completed_step=50))
    driver.answer_all("/stop/")
    driver.advanced(20, resumed_step=19)
    assert driver.incident().state is IncidentState.VERIFYING
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.send(ev.JobResumeRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.STARTING
    assert driver.incident().state is IncidentState.VERIFYING


@pytest.mark.parametrize("ask", [ev.JobCancelRequested, ev.JobPauseRequested])
def test_stopping_for_the_user_does_not_wait_for_a_lost_node(
    ask: type[ev.JobCancelRequested] | type[ev.JobPauseRequested],
) -> None:
    """Without an incident nobody noted that the node was lost: the job hung in SUSPENDING."""
    driver = Driver().running()
    driver.send(ask(job_id=JOB))
    driver.answer("job/a1/stop/n1")
    driver.lose("n2", gone=False)
    assert driver.job().state in (JobState.CANCELLED, JobState.PAUSED)
    assert driver.node("n2").state is NodeState.QUARANTINED


def test_a_drain_called_off_in_time_quarantines_nobody() -> None:
    """Seeds 2, 28, 80: the healthy node was quarantined because it was to be moved off."""
    driver = Driver().running()
    driver.send(NodeDrainRequested(node=N1))
    driver.send(NodeUncordonRequested(node=N1))
    driver.answer_all("/stop/")
    assert driver.node("n1").state is NodeState.ASSIGNED
    assert driver.node("n1").quarantines_s == ()
    assert driver.job().state is JobState.STARTING


def test_a_drain_during_preflight_is_heeded() -> None:
    """The job started on the node all the same."""
    driver = Driver()
    for node in ("n1", "n2", "n3"):
        driver.join(node)
    driver.submit()
    driver.send(NodeDrainRequested(node=N1))
    driver.answer_all("/suite/")
    driver.answer_all("/suite/")
    assert driver.node("n1").state is NodeState.DRAINED
    assert driver.job().nodes == ("n3", "n2")


def test_a_stop_that_failed_is_not_taken_for_done() -> None:
    """Seed 240: the next attempt started beside workers that SIGKILL could not end."""
    driver = Driver().running()
    driver.send(driver.exited(0))
    driver.answer("job/a1/stop/n1")
    lines = driver.answer("job/a1/stop/n2", ok=False, error_kind="internal", detail="workers stay")
    assert "n2 QUARANTINED" in lines
    # It answers, but nothing may start there before its agent has.
    driver.wait(SETTINGS.cooldown_s + 1.0)
    assert driver.node("n2").state is NodeState.QUARANTINED
    driver.join("n2", incarnation="two")
    assert driver.node("n2").state is NodeState.DRAINED


def test_nodes_that_do_not_stop_are_replaced_along_with_lost_ones() -> None:
    """Seed 3039: of two kinds of bad nodes only one was replaced."""
    driver = Driver().running()
    driver.send(driver.exited(0))
    driver.lose("n1", gone=False)
    driver.answer("job/a1/stop/n2", ok=False, detail="workers stay")
    assert driver.incident().culprits == ("n1", "n2")
    assert driver.incident().action is Action.REPLACE_NODES


def test_a_start_that_an_agent_forgot_does_not_speak_against_its_node() -> None:
    """Seed 189: the agent was restarted while it started workers and refused the repeat."""
    driver = Driver().starting()
    driver.send(NodeDisconnected(node=N2))
    driver.join("n2", incarnation="two")
    # It is not asked again: the order was for the agent before.
    assert "job/a1/start/n2" not in driver.machine.state.commands
    driver.answer_all("/stop/")
    assert driver.incident().action is Action.RESTART_IN_PLACE
    assert driver.node("n2").quarantines_s == ()


def test_a_command_given_up_in_the_same_batch_is_not_sent() -> None:
    """Seed 157: a joining node was sent the start that its own joining had made pointless."""
    driver = Driver().starting()
    driver.answer("job/a1/start/n1")
    driver.send(driver.exited(0))
    assert driver.machine.state.commands.keys() == {"job/a1/stop/n1", "job/a1/stop/n2"}
    driver = Driver().starting()
    driver.send(NodeDisconnected(node=N2))
    ended = driver.exited(1)
    status = WorkerStatus(job_id=JOB, attempt=Attempt(1), rank=1, exit=ended)
    lines = driver.join("n2", (status,))
    assert "close job/a1/start/n2" in lines
    assert "send job/a1/start/n2" not in lines
    assert "send job/a1/stop/n2" in lines


def test_one_node_that_is_heard_again_does_not_end_the_blindness_of_the_others() -> None:
    """Seed 17: a single heartbeat made the controller trust its eyes; the rest was lost."""
    driver = Driver().running(spares=6)
    for number in range(1, 9):
        driver.send(NodeLate(node=NodeId(f"n{number}"), silent_s=6.0))
    driver.wait(20.0)
    driver.send(NodeHeard(node=N3))
    assert driver.machine.controller_blind
    driver.send(NodeSilent(node=N1, silent_s=60.0))
    assert driver.job().state is JobState.RUNNING


def test_stragglers_get_a_moment_when_a_partition_heals() -> None:
    """Seeds 2, 7, 11: those that came back a second after the others were quarantined."""
    driver = Driver().running(spares=6)
    for number in range(1, 9):
        driver.send(NodeLate(node=NodeId(f"n{number}"), silent_s=6.0))
    for number in range(1, 9):
        driver.send(NodeSilent(node=NodeId(f"n{number}"), silent_s=60.0))
    for number in range(3, 9):
        driver.send(NodeHeard(node=NodeId(f"n{number}")))
    assert driver.job().state is JobState.RUNNING
    driver.wait(3.0)
    driver.send(NodeHeard(node=N1))
    driver.wait(SETTINGS.reconcile_s)
    # The one that is silent still is lost now, and not only at the end of the blindness.
    assert not driver.machine.controller_blind
    assert driver.job().state is JobState.SUSPENDING


def test_a_controller_that_starts_into_a_partition_suspects_itself() -> None:
    """Seed 63: what fell silent while agents had time to come back was never suspicious."""
    after = _restarted(Driver().running(spares=6), away_s=10.0)
    for number in range(1, 9):
        after.now_s += 0.5
        after.send(NodeLate(node=NodeId(f"n{number}"), silent_s=6.0))
    after.wait(SETTINGS.reconcile_s)
    assert after.machine.controller_blind


def test_nothing_that_was_due_happens_before_reality_is_known() -> None:
    """Seed 1072: the first call after a start judged by deadlines of before the crash."""
    before = Driver().running()
    before.send(before.exited(0))
    after = _restarted(before, away_s=600.0)
    assert after.job().state is JobState.SUSPENDING
    assert after.incident().state is IncidentState.EVIDENCE


def test_an_excluded_node_is_not_given_up_for_a_short_absence() -> None:
    """Every drained node whose timer was due was evicted when the controller came back."""
    before = Driver().running()
    before.lose("n2", gone=False)
    before.answer("job/a1/stop/n1")
    before.join("n2")
    before.answer("job/a1/stop/n2")
    assert before.node("n2").state is NodeState.DRAINED
    after = _restarted(before, away_s=SETTINGS.cooldown_s + 60.0)
    assert after.node("n2").state is NodeState.DRAINED
    after.join("n2")
    assert after.node("n2").state is NodeState.VALIDATING


def test_a_cordoned_drained_node_does_not_keep_the_timer_ringing() -> None:
    """Seeds 54, 134: wake_at named a moment that had passed, for ever."""
    driver = Driver().running()
    driver.lose("n3", gone=False)
    driver.join("n3")
    driver.send(NodeCordonRequested(node=N3))
    driver.wait(SETTINGS.cooldown_s + 60.0)
    wake_s = driver.machine.wake_at()
    assert wake_s is None or wake_s > driver.now_s


def test_a_silent_node_is_not_taken_for_drained() -> None:
    """Seed 54: its session had not ended yet, so it counted as being there."""
    driver = Driver().running()
    driver.send(NodeSilent(node=N3, silent_s=60.0))
    assert driver.node("n3").state is NodeState.QUARANTINED


def test_a_node_that_came_back_while_the_breaker_was_open_is_checked_instead() -> None:
    """Seed 3319: a job waited for the breaker in order to exclude nodes long since back."""
    driver = Driver().running()
    driver.lose("n3", gone=False)
    driver.lose("n2", gone=False)
    driver.answer("job/a1/stop/n1")
    assert driver.job().state is JobState.REPAIRING
    driver.join("n2")
    driver.answer("job/a1/stop/n2")
    assert driver.job().state is JobState.PREFLIGHT
    assert driver.job().unchecked == ("n2",)
    assert driver.node("n2").quarantines_s == ()


def test_a_node_lost_while_a_job_waits_for_another_is_replaced_at_once() -> None:
    """It kept its place, and the next start waited half an hour for it."""
    driver = Driver().running(spares=0)
    driver.lose("n2")
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.PROVISIONING
    driver.lose("n1", gone=False)
    driver.join("n7")
    driver.join("n8")
    driver.answer_all("/suite/")
    assert driver.job().state is JobState.STARTING
    assert sorted(str(node) for node in driver.job().nodes) == ["n7", "n8"]


def test_storage_trouble_ends_with_its_job() -> None:
    """Seeds 10, 84: the incident of a job that had succeeded stayed open."""
    driver = Driver().running()
    driver.send(ev.CheckpointFailed(job_id=JOB, node=N1, step=50, detail="full", at_s=1.0))
    for rank in (0, 1):
        driver.send(driver.exited(rank, code=0))
    assert driver.job().state is JobState.SUCCEEDED
    # The last upload may still succeed, until its nodes have forgotten the job.
    assert driver.incident().state is IncidentState.OPEN
    driver.answer_all("/forget/")
    assert driver.incident().state is IncidentState.CLOSED
    assert "newest in storage: none" in driver.incident().reason


def test_a_hang_that_the_controller_slept_through_is_found() -> None:
    """No report had come since the restart, so nobody measured the silence."""
    job = Driver().running().job()
    table = ProgressTable()
    assert table.stalled(job, 5000.0, 300.0) is None
    assert table.stalled(job, 5200.0, 300.0) is None
    assert table.stalled(job, 5301.0, 300.0) == pytest.approx(301.0)
    assert table.stalled(job, 5400.0, 300.0) is None


def test_workers_on_a_node_that_lost_its_place_are_stopped_when_it_joins() -> None:
    """They are of the present attempt, but the node was given up meanwhile."""
    driver = Driver().running()
    driver.lose("n2")
    status = WorkerStatus(job_id=JOB, attempt=Attempt(1), rank=1, exit=None)
    assert "send job/a1/stop/n2" in driver.join("n2", (status,))


def test_a_free_node_with_workers_still_to_stop_gets_no_job() -> None:
    """Two jobs' workers met on a node that a cancelled job had left unstopped."""
    driver = Driver().running(spares=0)
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer("job/a1/stop/n1")
    driver.wait(61.0)
    assert driver.job().state is JobState.CANCELLED
    other = JobId("other")
    driver.submit(other)
    assert driver.job(other).state is JobState.QUEUED
    driver.answer("job/a1/stop/n2")
    assert driver.job(other).state is JobState.PREFLIGHT


def test_several_nodes_that_do_not_stop_are_one_incident() -> None:
    """Seed 577: each node's sign closed the older incident again and opened another."""
    driver = Driver().running()
    driver.send(driver.exited(0))
    driver.answer_all("/stop/")
    assert driver.incident().state is IncidentState.ACTING
    driver.send(ev.JobPauseRequested(job_id=JOB))
    driver.wait(61.0)
    assert driver.incident(1).state is IncidentState.CLOSED
    assert {item.node for item in driver.incident(2).evidence} == {N1, N2}
    assert driver.job().num_incidents == 2


def test_a_node_that_is_back_while_the_breaker_holds_another_is_checked_once() -> None:
    """Seed 23: it was noted at each event, 693 times, and its check forgotten each time."""
    driver = Driver().running(spares=2)
    driver.lose("n4", gone=False)
    driver.lose("n1", gone=False)
    driver.lose("n2", gone=False)
    driver.join("n1")
    driver.answer("job/a1/stop/n1")
    assert driver.job().state is JobState.REPAIRING
    for _ in range(3):
        driver.send(NodeLate(node=N2, silent_s=90.0))
    assert [item.phase for item in driver.incident().timeline].count("back") == 1
    assert driver.job().unchecked.count(N1) == 1
