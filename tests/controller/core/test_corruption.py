"""Host memory that did not hold what was written: told, suspected, and the second time replaced."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.corruption import LONGEST_OCCASION_S, SAME_OCCASION_S
from controller.core.kinds import Action, Cause
from controller.core.settings import Settings
from controller.core.states import IncidentState, JobState, NodeState
from outlast.ids import NodeId
from tests.controller.core.driver import JOB, Driver

WORDS = "n2: step 9, host memory, slot 1 of rank 1: bytes 0 to 64 do not fit their checksum"


def damaged(driver: Driver, node: str | None = "n2", **changes: object) -> ev.Detected:
    values: dict[str, object] = {
        "job_id": JOB,
        "attempt": driver.attempt(),
        "cause": Cause.SILENT_CORRUPTION,
        "node": None if node is None else NodeId(node),
        "rank": 1,
        "detail": WORDS,
        "at_s": driver.now_s,
    }
    return ev.Detected(**{**values, **changes})  # type: ignore[arg-type]


def test_the_first_time_is_an_incident_beside_training_and_the_node_is_a_suspect() -> None:
    driver = Driver().running()
    driver.send(damaged(driver))
    assert driver.job().state is JobState.RUNNING
    incident = driver.incident()
    assert (incident.state, incident.cause) == (IncidentState.OPEN, Cause.SILENT_CORRUPTION)
    assert incident.culprits == ("n2",)
    assert incident.action is None
    assert WORDS in incident.reason
    assert "within 30 min, the node is replaced" in incident.reason
    assert driver.node("n2").state is NodeState.SUSPECT
    assert driver.node("n1").state is NodeState.ASSIGNED


def test_all_slots_of_a_rank_are_one_occasion() -> None:
    driver = Driver().running()
    for slot in range(3):
        driver.send(damaged(driver, detail=f"slot {slot}"))
        driver.wait(10.0)
    assert driver.job().state is JobState.RUNNING
    assert [item.detail for item in driver.incident().evidence] == ["slot 0", "slot 1", "slot 2"]


def test_a_restore_that_reads_large_slots_for_long_is_one_occasion() -> None:
    driver = Driver().running()
    for slot in range(4):
        driver.send(damaged(driver, detail=f"slot {slot}"))
        driver.wait(SAME_OCCASION_S - 10)
    assert driver.job().state is JobState.RUNNING
    assert len(driver.incident().evidence) == 4


def test_damage_that_goes_on_and_on_replaces_the_node() -> None:
    driver = Driver().running(spares=1)
    begun_s = driver.now_s
    while driver.job().state is JobState.RUNNING:
        driver.send(damaged(driver, detail=f"at {driver.now_s}"))
        assert driver.now_s - begun_s < LONGEST_OCCASION_S + SAME_OCCASION_S
        driver.wait(SAME_OCCASION_S - 10)
    assert driver.job().state is JobState.SUSPENDING


def test_a_second_time_lately_replaces_the_node() -> None:
    driver = Driver().running(spares=1)
    driver.send(damaged(driver))
    driver.wait(SAME_OCCASION_S + 1)
    driver.send(damaged(driver))
    assert driver.job().state is JobState.SUSPENDING
    driver.answer_all("stop")
    incident = driver.incident(2)
    assert (incident.action, incident.cause) == (Action.REPLACE_NODES, Cause.SILENT_CORRUPTION)
    assert incident.culprits == ("n2",)
    assert "the second time lately, see job.i1" in incident.reason
    assert "n2" not in driver.job().nodes
    assert driver.node("n2").quarantine
    # Losing hardware is no sign of a job that cannot succeed.
    assert driver.job().retry_left == driver.job().plan.retry_budget


def test_another_node_is_a_first_time() -> None:
    driver = Driver().running()
    driver.send(damaged(driver, node="n1"))
    driver.wait(SAME_OCCASION_S + 1)
    driver.send(damaged(driver))
    assert driver.job().state is JobState.RUNNING
    assert [driver.incident(number).culprits for number in (1, 2)] == [("n1",), ("n2",)]


def test_long_ago_counts_no_more() -> None:
    driver = Driver().running()
    driver.send(damaged(driver))
    driver.wait(Settings().suspect_s + 1)
    driver.advanced(50)
    assert driver.incident().state is IncidentState.CLOSED
    assert driver.incident().timeline[-1].detail == "it was not seen again"
    driver.send(damaged(driver))
    assert driver.job().state is JobState.RUNNING


def test_a_fault_elsewhere_keeps_its_own_incident_and_culprit() -> None:
    """A rank is killed on n1; in the restart a rank of n2 finds its slots damaged."""
    driver = Driver().running()
    driver.send(driver.exited(rank=0))
    driver.answer_all("stop")
    assert driver.job().state is JobState.STARTING
    driver.send(damaged(driver))
    killed, corrupt = driver.incident(1), driver.incident(2)
    assert (killed.cause, killed.culprits) == (Cause.WORKER_KILLED, ("n1",))
    assert (corrupt.cause, corrupt.culprits) == (Cause.SILENT_CORRUPTION, ("n2",))
    assert driver.job().incident == killed.incident


def test_what_is_reported_while_workers_are_stopped_is_not_lost() -> None:
    driver = Driver().running()
    driver.send(driver.exited(rank=0))
    assert driver.job().state is JobState.SUSPENDING
    driver.send(damaged(driver))
    assert driver.incident(2).cause is Cause.SILENT_CORRUPTION
    assert driver.node("n2").state is NodeState.SUSPECT


@pytest.mark.parametrize("node", ["n9", None])
def test_a_node_that_never_had_the_job_blames_nobody(node: str | None) -> None:
    driver = Driver().running()
    event = damaged(driver, node=node)
    assert driver.send(event) == []
