"""The search for what is at fault, from the verdict to the restart."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.changes import fold
from controller.core.effects import SearchFaults
from controller.core.kinds import Cause
from controller.core.states import JobState, NodeState
from tests.controller.core.driver import JOB, Driver


def test_a_second_fault_on_a_node_is_diagnosed_and_a_failed_check_replaces_it() -> None:
    driver = Driver().running()
    for number in (1, 2):
        driver.send(driver.exited(0))
        driver.answer_all(f"a{number}/stop/")
    assert driver.job().state is JobState.DIAGNOSING
    assert driver.searched({"n1": "fail"})[:5] == [
        "job.i2 EVIDENCE",
        "job.i2 VERDICT",
        "job.i2 ACTING",
        "job REPAIRING a2",
        "n1 QUARANTINED",
    ]
    assert driver.job().nodes == ("n3", "n2")


def test_a_device_that_reports_a_fault_of_its_own_has_its_node_checked_at_once() -> None:
    driver = Driver().running()
    driver.send(driver.exited(0, fault_class="device", detail="uncorrectable ECC error"))
    driver.answer_all("a1/stop/")
    assert driver.job().state is JobState.DIAGNOSING
    assert driver.incident().cause is Cause.DEVICE
    assert "a device reports a fault of its own" in driver.incident().reason
    driver.searched({"n1": "fail"})
    assert driver.job().nodes == ("n3", "n2")


def diagnosing(**changes: object) -> Driver:
    """A job whose nodes are being searched for a fault."""
    driver = Driver().running(**{"in_place_restarts": 0, **changes})  # type: ignore[arg-type]
    driver.send(driver.exited(0))
    lines = driver.answer_all("/stop/")
    assert lines[-1] == "search job.i1.d1 n1 n2"
    return driver


def test_a_search_that_finds_nothing_is_noted_and_training_goes_on() -> None:
    driver = diagnosing()
    driver.searched()
    assert driver.job().state is JobState.STARTING
    incident = driver.incident()
    assert incident.findings == (("n1", "pass"), ("n2", "pass"))
    assert "checks found nothing" in incident.reason
    assert any("2 nodes checked; 0 bad links" in entry.detail for entry in incident.timeline)


def test_a_bad_link_costs_the_end_with_the_worse_figures() -> None:
    driver = diagnosing()
    driver.searched(links=(("n1", "n2"),), figures={"n1": 0.97, "n2": 0.6})
    assert driver.incident().bad_links == (("n1", "n2"),)
    assert driver.incident().culprits == ("n2",)
    assert driver.node("n2").state in (NodeState.QUARANTINED, NodeState.DRAINED)
    assert driver.job().nodes == ("n1", "n3")
    assert "n2 has the worse figures" in driver.node("n2").reason


def test_results_of_another_search_are_dropped() -> None:
    driver = diagnosing()
    assert driver.searched({"n1": "fail"}, search="job.i0.d1") == []
    assert driver.job().state is JobState.DIAGNOSING
    driver.searched()
    assert driver.job().state is JobState.STARTING
    # The same result again, and late.
    assert driver.searched({"n1": "fail"}, search="job.i1.d1") == []
    assert driver.job().state is JobState.STARTING


def test_a_search_is_asked_for_once_and_again_by_the_next_controller() -> None:
    driver = diagnosing()
    assert driver.send(ev.TimePassed()) == []
    again = Driver(fold(driver.machine.state.as_changes()))
    again.now_s = driver.now_s
    again.send(ev.ControllerStarted(term=2))
    # Not before the agents have had their time to come back.
    early = [line for node in ("n1", "n2", "n3") for line in again.join(node)]
    assert not [line for line in early if line.startswith("search")]
    assert "search job.i1.d1 n1 n2" in again.wait(60.0)
    again.searched({"n2": "fail"})
    assert again.job().nodes == ("n1", "n3")


def test_a_search_that_never_ends_accuses_nobody() -> None:
    driver = diagnosing()
    driver.wait(driver.job().plan.diagnose_timeout_s + 1.0)
    assert driver.job().state is JobState.STARTING
    assert {verdict for _, verdict in driver.incident().findings} == {"inconclusive"}


def test_a_node_that_is_lost_ends_the_search() -> None:
    driver = diagnosing()
    driver.lose("n1")
    assert driver.job().state is not JobState.DIAGNOSING
    assert "n1" not in driver.job().nodes
    assert driver.searched({"n2": "fail"}, search="job.i1.d1") == []


def test_a_cancelled_job_hears_no_more_of_its_search() -> None:
    driver = diagnosing()
    driver.send(ev.JobCancelRequested(job_id=JOB))
    assert driver.job().state is JobState.CANCELLED
    assert driver.searched({"n1": "fail"}, search="job.i1.d1") == []


def test_a_spare_that_the_search_finds_bad_replaces_nobody() -> None:
    driver = diagnosing(spares=2)
    driver.searched({"n1": "fail", "n3": "fail"})
    assert driver.node("n3").state is NodeState.READY
    assert driver.node("n3").cordoned
    assert "failed its checks in search job.i1.d1" in driver.node("n3").reason
    # The breaker allows one quarantine: it is for the job's own node.
    assert driver.node("n1").state is NodeState.DRAINED
    assert driver.job().nodes == ("n4", "n2")
    alone = diagnosing()
    alone.searched({"n3": "fail"})
    assert alone.node("n3").state is NodeState.DRAINED
    assert alone.job().nodes == ("n1", "n2")


@pytest.mark.parametrize("request_", [ev.JobCancelRequested, ev.JobPauseRequested])
def test_a_job_that_waits_no_longer_ends_its_search(
    request_: type[ev.JobCancelRequested] | type[ev.JobPauseRequested],
) -> None:
    driver = diagnosing()
    assert "end job.i1.d1" in driver.send(request_(job_id=JOB))


def test_a_search_whose_job_restarts_without_it_is_ended() -> None:
    driver = diagnosing()
    assert "end job.i1.d1" in driver.lose("n1")
    late = diagnosing()
    assert "end job.i1.d1" in late.wait(late.job().plan.diagnose_timeout_s + 1.0)
    told = diagnosing()
    assert "end job.i1.d1" not in told.searched()


def test_a_search_asked_for_again_has_what_is_left_of_the_patience() -> None:
    driver = diagnosing()
    driver.now_s += 400.0
    again = Driver(fold(driver.machine.state.as_changes()))
    again.now_s = driver.now_s
    again.send(ev.ControllerStarted(term=2))
    for node in ("n1", "n2"):
        again.join(node)
    again.now_s += 10.0
    effects = again.machine.handle(ev.TimePassed(), again.now_s)
    (asked,) = (effect for effect in effects if isinstance(effect, SearchFaults))
    assert again.now_s + asked.timeout_s < (again.job().deadline_s or 0.0)
    assert asked.timeout_s == pytest.approx(0.9 * 190.0)


def test_a_bad_link_to_a_spare_costs_no_node_of_the_job() -> None:
    driver = diagnosing()
    driver.searched(links=(("n1", "n3"),))
    assert driver.incident().bad_links == ()
    assert driver.job().nodes == ("n1", "n2")
    assert any("bad link n1--n3" in entry.detail for entry in driver.incident().timeline)
