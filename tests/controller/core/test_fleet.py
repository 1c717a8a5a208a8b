"""Nodes: losing them, excluding them, getting them back, and not believing too much."""

from __future__ import annotations

from dataclasses import replace

from controller.core import events as ev
from controller.core.changes import NodePut, fold
from controller.core.node_events import (
    NodeBack,
    NodeClosed,
    NodeCordonRequested,
    NodeDisconnected,
    NodeForgetRequested,
    NodeGone,
    NodeHeard,
    NodeLate,
    NodeReleased,
    NodeReplaced,
    NodesAwaited,
    NodeSilent,
    NodeUncordonRequested,
    WorkerStatus,
)
from controller.core.settings import Settings
from controller.core.states import JobState, NodeState
from outlast.failures import ErrorKind
from outlast.ids import Attempt, JobId, NodeId
from tests.controller.core.driver import JOB, Driver

SETTINGS = Settings()


def _quarantined() -> Driver:
    """n2 was silent and is out; the job goes on elsewhere."""
    driver = Driver().running()
    driver.lose("n2", gone=False)
    driver.answer("job/a1/stop/n1")
    driver.answer_all("n3/suite/")
    assert driver.node("n2").state is NodeState.QUARANTINED
    return driver


def test_a_quarantined_node_comes_back_after_cooling_down_and_two_clean_checks() -> None:
    driver = _quarantined()
    lines = driver.join("n2")
    assert lines == ["send job/a1/stop/n2"]
    assert driver.answer("job/a1/stop/n2") == ["close job/a1/stop/n2", "n2 DRAINED"]
    assert driver.wait(SETTINGS.cooldown_s)[:1] == ["n2 VALIDATING"]
    driver.answer_all("n2/suite/")
    assert driver.node("n2").state is NodeState.VALIDATING
    driver.answer_all("n2/suite/")
    assert driver.node("n2").state is NodeState.READY


def test_a_node_that_fails_its_validation_waits_for_a_person() -> None:
    driver = _quarantined()
    driver.join("n2")
    driver.answer("job/a1/stop/n2")
    driver.wait(SETTINGS.cooldown_s)
    suite = next(c for c in driver.machine.state.commands if c.startswith("n2/suite/"))
    assert driver.answer(suite, verdict="fail")[1:] == ["n2 REPAIRING", "alert"]
    assert driver.send(NodeUncordonRequested(node=NodeId("n2"))) == ["n2 READY"]


def test_a_quarantined_node_that_never_comes_back_is_retired() -> None:
    driver = _quarantined()
    driver.advanced(20, resumed_step=9)
    assert driver.wait(SETTINGS.abandon_s)[-3:] == ["n2 RETIRED", "evict n2", "alert"]


def test_a_retired_node_that_joins_again_is_validated() -> None:
    driver = Driver().running()
    driver.lose("n2")
    assert driver.join("n2", incarnation="two")[:1] == ["n2 VALIDATING"]


def test_a_persons_cordon_keeps_a_node_out_until_a_person_ends_it() -> None:
    driver = Driver()
    driver.join("n1")
    driver.join("n2")
    driver.send(NodeCordonRequested(node=NodeId("n2")))
    driver.submit()
    assert driver.job().state is JobState.QUEUED
    assert "job PREFLIGHT a0" in driver.send(NodeUncordonRequested(node=NodeId("n2")))


def test_node_that_a_person_returned_keeps_no_reason_of_its_cordon() -> None:
    driver = Driver()
    driver.join("n2")
    cordoned = replace(driver.node("n2"), cordoned=True, reason="its checks failed")
    driver.machine.state.apply(NodePut(node=cordoned))
    driver.send(NodeUncordonRequested(node=NodeId("n2")))
    assert driver.node("n2").state is NodeState.READY
    assert driver.node("n2").reason == "a person returned it"


def test_many_silent_nodes_at_once_are_our_own_blindness() -> None:
    driver = Driver().running(spares=6)
    for number in range(1, 9):
        driver.send(NodeLate(node=NodeId(f"n{number}"), silent_s=6.0))
    assert driver.machine.controller_blind
    for number in range(1, 9):
        driver.send(NodeSilent(node=NodeId(f"n{number}"), silent_s=60.0))
    assert driver.job().state is JobState.RUNNING
    # A rack that is truly lost is dealt with once the distrust has ended.
    driver.wait(SETTINGS.blind_s)
    assert not driver.machine.controller_blind
    assert driver.job().state is JobState.REPAIRING


def test_blindness_that_heals_costs_nothing() -> None:
    driver = Driver().running(spares=6)
    for number in range(1, 9):
        driver.send(NodeLate(node=NodeId(f"n{number}"), silent_s=6.0))
    for number in range(1, 9):
        driver.send(NodeSilent(node=NodeId(f"n{number}"), silent_s=60.0))
    for number in range(1, 9):
        driver.send(NodeHeard(node=NodeId(f"n{number}")))
    driver.wait(2 * SETTINGS.blind_s)
    assert all(node.quarantines_s == () for node in driver.machine.state.nodes.values())


def test_connections_that_all_break_and_come_back_leave_no_blindness() -> None:
    """Before anybody is late: so no node is heard again, they join."""
    driver = Driver().running(spares=6)
    for number in range(1, 9):
        driver.send(NodeDisconnected(node=NodeId(f"n{number}")))
    assert driver.machine.controller_blind
    for number in range(1, 9):
        trains = WorkerStatus(job_id=JOB, attempt=Attempt(1), rank=number - 1, exit=None)
        driver.join(f"n{number}", (trains,) if number <= 2 else ())
    driver.wait(SETTINGS.reconcile_s)
    assert not driver.machine.controller_blind
    assert driver.job().state is JobState.RUNNING
    # One that falls silent now is not waited for.
    driver.send(NodeSilent(node=NodeId("n1"), silent_s=60.0))
    assert driver.job().state is not JobState.RUNNING


def test_a_cut_that_comes_back_is_distrusted_again() -> None:
    driver = Driver().running(spares=10)
    names = [f"n{number}" for number in range(1, 13)]
    for name in names:
        driver.send(NodeDisconnected(node=NodeId(name)))
    nodes = list(driver.job().nodes)
    for name in names:
        ranks = [nodes.index(NodeId(name))] if name in nodes else []
        driver.join(
            name,
            tuple(
                WorkerStatus(job_id=JOB, attempt=Attempt(1), rank=rank, exit=None) for rank in ranks
            ),
        )
    driver.wait(1.0)
    # While it is still being distrusted.
    for name in names:
        driver.send(NodeDisconnected(node=NodeId(name)))
    driver.wait(SETTINGS.reconcile_s)
    assert driver.machine.controller_blind
    for name in names:
        driver.send(NodeSilent(node=NodeId(name), silent_s=60.0))
    assert driver.job().state is JobState.RUNNING
    assert not any(node.quarantines_s for node in driver.machine.state.nodes.values())


def test_a_restarted_controller_adopts_what_runs() -> None:
    before = Driver().running()
    after = Driver(fold(before.machine.state.as_changes()))
    after.now_s = before.now_s + 30.0
    assert after.send(ev.ControllerStarted(term=2)) == []
    for number, rank in ((1, 0), (2, 1)):
        status = WorkerStatus(job_id=JOB, attempt=Attempt(1), rank=rank, exit=None)
        assert after.join(f"n{number}", (status,)) == []
    after.join("n3")
    assert after.wait(SETTINGS.reconcile_s) == []
    assert after.machine.state == before.machine.state


def test_an_agent_that_has_not_come_back_after_a_restart_is_no_second_sign() -> None:
    before = Driver().running()
    after = Driver(fold(before.machine.state.as_changes()))
    after.now_s = before.now_s + 30.0
    after.send(ev.ControllerStarted(term=2))
    # The cluster is read within a moment, agents need seconds to dial again.
    for node in ("n1", "n2"):
        assert after.send(_gone(node, "its kubelet is down", blames_host=True)) == []
    status = WorkerStatus(job_id=JOB, attempt=Attempt(1), rank=0, exit=None)
    assert after.join("n1", (status,)) == []
    after.wait(SETTINGS.reconcile_s)
    # One came back and trains; the other did not.
    assert after.node("n1").state is NodeState.ASSIGNED
    assert after.node("n2").state is NodeState.RETIRED


def test_a_restarted_controller_judges_nobody_before_reality_is_known() -> None:
    before = Driver().running()
    before.send(before.exited(0))
    after = Driver(fold(before.machine.state.as_changes()))
    # The stop order's patience ended while no controller was there.
    after.now_s = before.now_s + 3600.0
    assert after.send(ev.ControllerStarted(term=2)) == []
    after.join("n1")
    after.join("n2")
    after.answer_all("/stop/")
    assert after.job().state is JobState.STARTING


def test_an_agent_that_started_anew_has_lost_its_workers() -> None:
    driver = Driver().running()
    driver.send(NodeDisconnected(node=NodeId("n2")))
    assert driver.join("n2", incarnation="two")[:2] == ["job.i1 EVIDENCE", "job SUSPENDING a1"]
    assert "was restarted" in driver.incident().evidence[0].detail


def test_workers_of_an_old_attempt_are_stopped_wherever_they_turn_up() -> None:
    driver = _quarantined()
    driver.answer_all("/start/")
    driver.answer("job/a1/stop/n2")
    status = WorkerStatus(job_id=JOB, attempt=Attempt(1), rank=1, exit=None)
    lines = driver.join("n2", (status,))
    assert "send job/a1/stop/n2" in lines


def test_whatever_an_old_attempt_says_is_ignored() -> None:
    driver = Driver().running()
    old = driver.exited(0)
    driver.send(old)
    driver.answer_all("/stop/")
    driver.answer_all("/start/")
    assert driver.job().attempt == 2
    late_advance = ev.JobAdvanced(
        job_id=JOB, attempt=Attempt(1), completed_step=5, resumed_step=0, at_s=0.0
    )
    stall = ev.JobStalled(
        job_id=JOB, attempt=Attempt(1), stalled_s=999.0, culprit_ranks=(0,), detail=""
    )
    for event in (old, late_advance, stall):
        assert driver.send(event) == []


def test_an_answer_from_another_node_or_for_a_closed_command_is_ignored() -> None:
    driver = Driver().starting()
    start = next(iter(driver.machine.state.commands.values()))
    finished = ev.CommandFinished(
        command_id=start.command_id, node=start.node, ok=True, error_kind=ErrorKind.NONE, detail=""
    )
    stranger = ev.CommandFinished(
        command_id=start.command_id,
        node=NodeId("n3"),
        ok=False,
        error_kind=ErrorKind.NONE,
        detail="",
    )
    assert driver.send(stranger) == []
    assert driver.send(finished) == [f"close {start.command_id}"]
    assert driver.send(finished) == []


def test_open_commands_are_sent_again_when_their_node_joins() -> None:
    driver = Driver().starting()
    driver.send(NodeDisconnected(node=NodeId("n2")))
    assert driver.join("n2") == ["send job/a1/start/n2"]


def test_a_submission_repeated_with_its_request_id_changes_nothing() -> None:
    driver = Driver()
    driver.submit()
    assert driver.submit() == []


def test_two_jobs_never_share_a_node() -> None:
    driver = Driver().running(spares=1)
    driver.submit(JobId("other"), nodes=2)
    assert driver.job(JobId("other")).state is JobState.QUEUED
    driver.join("n4")
    assert driver.job(JobId("other")).nodes == ("n3", "n4")


# What a cluster says of its hosts


def _gone(node: str, detail: str, *, blames_host: bool) -> NodeGone:
    return NodeGone(node=NodeId(node), detail=detail, at_s=1100.0, blames_host=blames_host)


def test_a_node_that_was_taken_away_is_replaced_and_not_held_against_its_host() -> None:
    driver = Driver().running()
    driver.send(NodeDisconnected(node=NodeId("n2")))
    lines = driver.send(_gone("n2", "its pod was deleted", blames_host=False))
    assert "n2 RELEASED" in lines
    assert "evict n2" not in lines
    assert driver.job().state is JobState.SUSPENDING
    assert driver.node("n2").quarantine == ""
    assert driver.join("n2", incarnation="two")[:1] == ["n2 READY"]


def test_a_quarantine_has_one_session_from_the_fault_until_the_node_is_in_use() -> None:
    driver = _quarantined()
    session = driver.node("n2").quarantine
    assert session.startswith("n2/")
    driver.join("n2")
    driver.answer("job/a1/stop/n2")
    driver.wait(SETTINGS.cooldown_s)
    driver.answer_all("n2/suite/")
    assert driver.node("n2").state is NodeState.VALIDATING
    assert driver.node("n2").quarantine == session
    driver.answer_all("n2/suite/")
    assert driver.node("n2").quarantine == ""


def test_a_lost_host_is_in_quarantine_without_costing_the_breaker() -> None:
    driver = Driver().running()
    driver.lose("n2")
    assert driver.node("n2").state is NodeState.RETIRED
    assert driver.node("n2").quarantine.startswith("n2/")
    assert driver.node("n2").quarantines_s == ()


def test_a_person_returns_a_node_that_is_not_there_and_it_is_free_when_it_joins() -> None:
    driver = Driver().running()
    driver.lose("n2")
    assert driver.send(NodeUncordonRequested(node=NodeId("n2")))[0] == "n2 RELEASED"
    assert driver.node("n2").quarantine == ""
    # Nobody judges it silent meanwhile.
    assert driver.send(NodeSilent(node=NodeId("n2"), silent_s=60.0)) == []
    assert driver.join("n2", incarnation="two")[:1] == ["n2 READY"]


def test_a_cluster_that_takes_its_word_back_is_believed() -> None:
    driver = Driver().running()
    driver.send(_gone("n2", "its host is not ready", blames_host=True))
    # Its agent is well, so nothing is taken away.
    assert driver.job().state is JobState.RUNNING
    driver.send(NodeBack(node=NodeId("n2")))
    driver.send(NodeDisconnected(node=NodeId("n2")))
    assert driver.job().state is JobState.RUNNING


def test_a_closed_host_keeps_its_job_and_gets_no_new_one() -> None:
    driver = Driver().running()
    driver.send(NodeClosed(node=NodeId("n2"), reason="cordoned by others"))
    driver.send(NodeClosed(node=NodeId("n3"), reason="cordoned by others"))
    assert driver.job().state is JobState.RUNNING
    driver.submit(JobId("second"), nodes=1)
    assert driver.job(JobId("second")).state is JobState.QUEUED
    # It stays closed when its agent starts anew.
    driver.join("n3", incarnation="two")
    assert driver.job(JobId("second")).state is JobState.QUEUED
    driver.send(NodeClosed(node=NodeId("n3"), reason=""))
    assert driver.job(JobId("second")).nodes == (NodeId("n3"),)


def test_a_free_node_is_given_back_when_asked_for_and_one_in_use_is_not() -> None:
    driver = Driver().running()
    assert driver.send(NodeReleased(node=NodeId("n2"))) == []
    assert driver.send(NodeReleased(node=NodeId("n3"))) == ["n3 RELEASED"]
    assert driver.send(NodeReleased(node=NodeId("nobody"))) == []


def test_a_free_node_that_still_has_something_to_do_is_not_given_back() -> None:
    driver = Driver().running()
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert driver.node("n2").state is NodeState.READY
    # It uploads and cleans up for the job that has ended.
    assert driver.send(NodeReleased(node=NodeId("n2"))) == []
    driver.answer_all("/forget/")
    assert driver.send(NodeReleased(node=NodeId("n2"))) == ["n2 RELEASED"]


def test_a_job_without_nodes_says_how_it_stands_with_those_that_are_to_come() -> None:
    driver = Driver()
    driver.submit()
    assert "outlast agent" in driver.job().reason
    driver.send(NodesAwaited(detail="2 pods are on the way"))
    assert driver.job().reason.endswith("for its first start; 2 pods are on the way")


def test_another_machine_under_the_name_of_a_lost_one_may_be_used() -> None:
    driver = Driver().running()
    assert driver.send(NodeReplaced(node=NodeId("n2"))) == []
    driver.lose("n2")
    assert driver.send(NodeReplaced(node=NodeId("n2")))[0] == "n2 RELEASED"
    assert driver.node("n2").quarantine == ""
    assert driver.join("n2", incarnation="two")[:1] == ["n2 READY"]


def test_a_standby_that_a_person_holds_back_is_nobodys_spare() -> None:
    driver = Driver().running(spares=2, standby=1)
    driver.answer_all("/suite/")
    assert driver.node("n3").state is NodeState.STANDBY
    driver.send(NodeCordonRequested(node=NodeId("n3")))
    driver.answer_all("/suite/")
    assert driver.node("n4").state is NodeState.STANDBY
    # One is enough, once the person has let go.
    driver.send(NodeUncordonRequested(node=NodeId("n3")))
    assert sorted((driver.node("n3").state, driver.node("n4").state)) == ["READY", "STANDBY"]


def test_a_retired_node_is_forgotten_with_all_that_was_held_against_it() -> None:
    driver = _quarantined()
    forget = NodeForgetRequested(node=NodeId("n2"))
    assert driver.send(forget) == []
    why = driver.machine.why_not_forgotten(NodeId("n2"))
    assert why == "it is QUARANTINED; only retired and released nodes can be forgotten"
    driver.wait(SETTINGS.abandon_s)
    assert driver.machine.why_not_forgotten(NodeId("n2")) == ""
    assert driver.send(forget) == ["n2 forgotten"]
    assert NodeId("n2") not in driver.machine.state.nodes
    assert fold(driver.machine.state.as_changes()) == driver.machine.state
    assert driver.machine.why_not_forgotten(NodeId("n2")) == "it is not there"
    # It may come back, as a node that nobody has seen before.
    driver.join("n2")
    assert driver.node("n2").quarantine == ""
    assert driver.node("n2").quarantines_s == ()


def test_a_node_that_is_there_or_in_use_is_not_forgotten() -> None:
    driver = Driver().running()
    why = driver.machine.why_not_forgotten
    assert why(NodeId("n1")) == "it is connected; stop its agent first"
    driver.send(NodeDisconnected(node=NodeId("n1")))
    assert why(NodeId("n1")) == "it has ranks of job job"
    assert driver.send(NodeForgetRequested(node=NodeId("n1"))) == []


def test_the_name_of_a_job_that_has_not_ended_is_taken() -> None:
    driver = Driver().running()
    driver.submit(JobId("job"))
    twin = ev.JobSubmitted(
        job_id=JobId("job-2"),
        name="job",
        request_id="another",
        spec_json="{}",
        checkpoint_url="memory://",
        plan=driver.job().plan,
    )
    assert driver.send(twin) == []
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.CANCELLED
    assert "job-2 QUEUED a0" in driver.send(twin)
