"""What detectors find: told, or dealt with, and never twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from controller.core import events as ev
from controller.core.detections import MAX_SIGNS
from controller.core.kinds import Action, Cause, EvidenceKind, Rung
from controller.core.node_events import NodeDrainRequested, NodeLate
from controller.core.orders import StopWorkers
from controller.core.states import IncidentState, JobState
from outlast.ids import NodeId
from outlast.skipped import StepRange
from tests.controller.core.driver import JOB, Driver


def detected(driver: Driver, cause: Cause = Cause.STRAGGLER, **changes: object) -> ev.Detected:
    values: dict[str, object] = {
        "job_id": JOB,
        "attempt": driver.attempt(),
        "cause": cause,
        "node": NodeId("n2"),
        "rank": 1,
        "detail": "rank 1 works 2 s in a step, 2.00 times the 1 s of its equals (limit 1.5)",
        "at_s": driver.now_s,
    }
    return ev.Detected(**{**values, **changes})  # type: ignore[arg-type]


def stalled(driver: Driver, *, is_program_error: bool = False) -> ev.JobStalled:
    return ev.JobStalled(
        job_id=JOB,
        attempt=driver.attempt(),
        stalled_s=2.0,
        culprit_ranks=(0, 1) if is_program_error else (1,),
        detail="operations out of order" if is_program_error else "rank 1 is in no operation",
        limit="at most 1.8 s: 3 x the longest forward_backward",
        stood="rank 0 in dp all_reduce #7 (gradient_sync)",
        is_program_error=is_program_error,
    )


def test_what_is_only_logged_is_one_incident_until_it_is_over() -> None:
    driver = Driver().running()
    assert driver.send(detected(driver)) == ["job.i1 OPEN"]
    assert driver.send(detected(driver, detail="still")) == []
    assert driver.job().state is JobState.RUNNING
    incident = driver.incident()
    assert (incident.cause, incident.action) == (Cause.STRAGGLER, None)
    assert "limit 1.5); training goes on" in incident.reason
    assert [item.detail for item in incident.evidence][1:] == ["still"]
    ended = ev.DetectionEnded(job_id=JOB, cause=Cause.STRAGGLER, node=NodeId("n2"), detail="over")
    assert driver.send(ended) == ["job.i1 CLOSED"]


def test_what_is_found_again_is_counted_and_its_record_stays_small() -> None:
    driver = Driver().running()
    spike = detected(driver, cause=Cause.SPIKE, node=None, rank=None, detail="step 1: loss 9")
    assert driver.send(spike) == ["job.i1 OPEN"]
    for step in range(2, 106):
        at_s = driver.now_s + step
        assert driver.send(replace(spike, detail=f"step {step}: loss 9", at_s=at_s)) == []
    driver.send(replace(spike, detail="step 107: loss 9", at_s=driver.now_s + 107, count=2))
    incident = driver.incident()
    assert driver.job().num_incidents == 1
    assert (incident.count, incident.last_s) == (107, driver.now_s + 107)
    details = [sign.detail for sign in incident.evidence]
    assert len(details) == MAX_SIGNS
    assert (details[0], details[-1]) == ("step 1: loss 9", "step 107: loss 9")


def test_what_is_found_in_a_start_is_told_and_the_start_goes_on() -> None:
    driver = Driver().starting()
    waits = detected(driver, cause=Cause.STORAGE)
    assert driver.send(waits) == ["job.i1 OPEN"]
    assert driver.job().state is JobState.STARTING
    assert driver.incident().reason.endswith("the start goes on")
    driver.advanced(1)
    assert driver.job().state is JobState.RUNNING
    assert driver.incident().state is IncidentState.OPEN
    driver.commit(1)
    assert driver.incident().state is IncidentState.CLOSED


def test_two_nodes_have_an_incident_each() -> None:
    driver = Driver().running()
    assert driver.send(detected(driver)) == ["job.i1 OPEN"]
    assert driver.send(detected(driver, node=NodeId("n1"), rank=0)) == ["job.i2 OPEN"]


def test_what_was_seen_in_an_attempt_ends_with_it() -> None:
    driver = Driver().running()
    driver.send(detected(driver))
    driver.send(driver.exited())
    driver.answer_all("/stop/")
    assert driver.incident(1).state is IncidentState.CLOSED
    assert driver.send(detected(driver)) == []


def test_an_old_attempt_s_detection_is_dropped() -> None:
    driver = Driver().running()
    assert driver.send(detected(driver, attempt=0)) == []


def test_a_detector_that_acts_has_the_node_checked_once() -> None:
    driver = Driver().running()
    driver.send(detected(driver, acts=True))
    assert driver.job().state is JobState.SUSPENDING
    stops = [c.command for c in driver.machine.state.commands.values()]
    assert [stop.graceful for stop in stops if isinstance(stop, StopWorkers)] == [True, True]
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING
    assert "a detector that acts speaks against it" in driver.incident().reason
    driver.searched({"n2": "fail"})
    incident = driver.incident()
    assert (incident.cause, incident.action) == (Cause.NODE_UNHEALTHY, Action.REPLACE_NODES)


def test_a_node_that_passed_its_checks_is_not_stopped_for_the_same_again() -> None:
    driver = Driver().running()
    driver.send(detected(driver, acts=True))
    driver.answer_all("/stop/")
    driver.searched()
    assert driver.incident().action is Action.RESTART_IN_PLACE
    assert driver.incident().cause is Cause.STRAGGLER
    driver.answer_all("/start/")
    driver.advanced(20, 10)
    driver.send(detected(driver, acts=True))
    assert driver.job().state is JobState.RUNNING
    assert driver.incident(2).state is IncidentState.OPEN


def test_slow_steps_that_are_acted_on_have_all_nodes_checked_once() -> None:
    driver = Driver().running()
    slow = detected(driver, cause=Cause.SLOWDOWN, node=None, rank=None, acts=True)
    driver.send(slow)
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.DIAGNOSING
    assert "speaks against no node in particular" in driver.incident().reason
    driver.searched()
    assert driver.incident().action is Action.RESTART_IN_PLACE
    driver.answer_all("/start/")
    driver.advanced(20, 10)
    again = detected(driver, cause=Cause.SLOWDOWN, node=None, rank=None, acts=True)
    assert driver.send(again) == ["job.i2 OPEN"]
    assert driver.job().state is JobState.RUNNING


def spiked(driver: Driver, step: int) -> None:
    """A spike that the job acts on; its ranks stop two steps later."""
    driver.send(detected(driver, cause=Cause.SPIKE, node=None, rank=None, acts=True, step=step))
    for command in [each for each in driver.machine.state.commands if "/stop/" in each]:
        driver.answer(command, completed_step=step + 2)


def test_a_spike_that_is_acted_on_is_rolled_back() -> None:
    driver = Driver().running(rollback_steps=10, total_steps=100, retry_budget=1)
    spiked(driver, 40)
    incident = driver.incident()
    assert (incident.cause, incident.action) == (Cause.SPIKE, Action.ROLL_BACK)
    assert "the weights after step 33; the batches of steps 34-43 are left out" in incident.reason
    assert driver.job().skipped == (StepRange(first=34, last=43),)
    # Nothing has failed.
    assert driver.job().retry_left == 1
    driver.answer_all("/start/")
    driver.advanced(43, 33)
    assert driver.incident().state is IncidentState.CLOSED


def test_a_spike_soon_after_a_rollback_is_only_told() -> None:
    driver = Driver().running(rollback_steps=10, total_steps=100)
    spiked(driver, 40)
    driver.answer_all("/start/")
    driver.advanced(43, 33)
    soon = detected(driver, cause=Cause.SPIKE, node=None, rank=None, acts=True, step=52)
    assert driver.send(soon) == ["job.i2 OPEN"]
    spiked(driver, 53)
    assert [str(each) for each in driver.job().skipped] == ["34-43", "47-56"]


def test_a_job_that_ends_with_a_spike_has_nothing_to_go_on_with() -> None:
    driver = Driver().running(rollback_steps=10, total_steps=42, retry_budget=0)
    spiked(driver, 40)
    assert driver.incident().action is Action.RESTART_IN_PLACE
    assert driver.incident().reason.endswith("so training ends with it")
    assert driver.job().skipped == ()


def test_a_spike_after_a_single_batch_was_left_out_is_rolled_back() -> None:
    driver = Driver().running(rollback_steps=10, total_steps=100)
    for _ in range(2):
        driver.send(driver.exited(0, fault_class="non_finite", detail="loss nan"))
        for command in [each for each in driver.machine.state.commands if "/stop/" in each]:
            driver.answer(command, completed_step=34)
        driver.answer_all("/start/")
        driver.advanced(34, 34)
    assert driver.job().skipped == (StepRange(first=35, last=35),)
    driver.advanced(40, 34)
    spiked(driver, 40)
    assert driver.incident(3).action is Action.ROLL_BACK


@pytest.mark.parametrize("gone", [True, False], ids=["lost", "drained"])
def test_a_spike_is_rolled_back_though_its_node_goes(gone: bool) -> None:
    driver = Driver().running(rollback_steps=10, total_steps=100)
    driver.send(detected(driver, cause=Cause.SPIKE, node=None, rank=None, acts=True, step=40))
    if gone:
        driver.lose("n2")
    else:
        driver.send(NodeDrainRequested(node=NodeId("n2")))
    for command in [each for each in driver.machine.state.commands if "/stop/" in each]:
        driver.answer(command, completed_step=42)
    incident = driver.incident()
    assert incident.action is Action.REPLACE_NODES
    # A rank that is lost may have come a step further than what is known.
    left_out = StepRange(first=35, last=44) if gone else StepRange(first=34, last=43)
    assert driver.job().skipped == (left_out,)
    assert f"the batches of steps {left_out} are left out" in incident.reason


def test_a_spike_is_rolled_back_though_no_rank_says_how_far_it_was() -> None:
    driver = Driver().running(rollback_steps=10, total_steps=100)
    driver.send(detected(driver, cause=Cause.SPIKE, node=None, rank=None, acts=True, step=40))
    driver.answer_all("/stop/")
    assert driver.job().skipped == (StepRange(first=32, last=41),)


@pytest.mark.parametrize(
    "plan",
    [{"retry_budget": 0}, {"ladder": (Rung.REPLACE, Rung.PAUSE)}, {"ladder": (Rung.RESTART,)}],
    ids=["no budget", "no restarts", "no checks"],
)
def test_a_job_is_not_given_up_because_it_is_slow(plan: dict[str, Any]) -> None:
    driver = Driver().running(**plan)
    driver.send(detected(driver, cause=Cause.SLOWDOWN, node=None, rank=None, acts=True))
    driver.answer_all("/stop/")
    if driver.job().state is JobState.DIAGNOSING:
        driver.searched()
    assert driver.incident().action is Action.RESTART_IN_PLACE
    assert driver.job().retry_left == driver.job().plan.retry_budget


def test_what_was_acted_on_is_remembered_though_a_rank_died_of_something_else() -> None:
    driver = Driver().running(retry_budget=9)
    driver.send(detected(driver, cause=Cause.HOST_MEMORY, acts=True))
    driver.send(driver.exited(1, fault_class="oom_host", detail="killed for want of memory"))
    driver.answer_all("/stop/")
    driver.searched()
    assert driver.incident().cause is Cause.OUT_OF_MEMORY
    driver.answer_all("/start/")
    driver.advanced(20, 10)
    assert driver.send(detected(driver, cause=Cause.HOST_MEMORY, acts=True)) == ["job.i2 OPEN"]


def test_a_hang_is_looked_at_before_its_workers_are_stopped() -> None:
    driver = Driver().running()
    driver.send(stalled(driver))
    stops = [c.command for c in driver.machine.state.commands.values()]
    assert all(stop.capture_stacks for stop in stops if isinstance(stop, StopWorkers))
    for node, rank in (("n1", 0), ("n2", 1)):
        (command,) = [c for c in driver.machine.state.commands if c.endswith(f"/stop/{node}")]
        stacks = ev.RankStacks(
            rank=rank, location="asleep at wait", text=f"of {node}", fingerprint=node
        )
        driver.answer(command, stacks=(stacks,))
    incident = driver.incident()
    assert incident.cause is Cause.HANG
    assert incident.culprits == (NodeId("n2"),)
    assert "at most 1.8 s" in incident.reason
    assert "asleep" not in incident.reason
    stacks_of = {i.rank: i.traceback for i in incident.evidence if i.kind is EvidenceKind.STACKS}
    assert stacks_of == {0: "of n1", 1: "of n2"}
    notes = {entry.phase: entry.detail for entry in incident.timeline}
    assert notes["last_operations"] == "rank 0 in dp all_reduce #7 (gradient_sync)"


def test_a_start_that_hangs_blames_the_node_that_holds_it_up() -> None:
    driver = Driver().starting()
    driver.send(stalled(driver))
    driver.answer_all("/stop/")
    incident = driver.incident()
    assert (incident.cause, incident.culprits) == (Cause.HANG, (NodeId("n2"),))


def test_a_start_is_left_alone_while_the_controller_cannot_see() -> None:
    driver = Driver().starting(spares=6)
    for number in range(1, 9):
        driver.send(NodeLate(node=NodeId(f"n{number}"), silent_s=6.0))
    assert driver.machine.controller_blind
    driver.send(stalled(driver))
    assert driver.job().state is JobState.STARTING


def test_where_nobody_is_blamed_the_odd_stacks_are_suspected() -> None:
    driver = Driver().running(nodes=3)
    driver.send(replace(stalled(driver), culprit_ranks=()))
    for rank, node in enumerate(("n1", "n2", "n3")):
        (command,) = [c for c in driver.machine.state.commands if c.endswith(f"/stop/{node}")]
        where = "loads" if rank == 2 else "waits"
        stacks = ev.RankStacks(rank=rank, location=where, text=where, fingerprint=where)
        driver.answer(command, stacks=(stacks,))
    assert driver.incident().culprits == (NodeId("n3"),)


def test_a_killed_worker_is_not_looked_at() -> None:
    driver = Driver().running()
    driver.send(driver.exited())
    stops = [c.command for c in driver.machine.state.commands.values()]
    assert not any(stop.capture_stacks for stop in stops if isinstance(stop, StopWorkers))


def test_ranks_that_lose_each_other_while_a_hang_is_stopped_do_not_explain_it() -> None:
    driver = Driver().running()
    driver.send(stalled(driver))
    driver.send(driver.exited(0, fault_class="cascade", detail="connection closed by peer"))
    driver.answer_all("/stop/")
    assert driver.incident().cause is Cause.HANG


def test_a_program_that_hangs_by_itself_fails_the_job_the_second_time() -> None:
    driver = Driver().running()
    driver.send(stalled(driver, is_program_error=True))
    driver.answer_all("/stop/")
    incident = driver.incident()
    assert (incident.cause, incident.action) == (Cause.USER_ERROR, Action.RESTART_IN_PLACE)
    assert incident.culprits == ()
    driver.answer_all("/start/")
    driver.advanced(1)
    driver.send(stalled(driver, is_program_error=True))
    driver.answer_all("/stop/")
    assert driver.job().state is JobState.FAILED
    assert "operations out of order" in driver.job().error
