"""Every second of a job is exactly one part, whatever happens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core import accounting, cost
from controller.core import events as ev
from controller.core.accounting import Account, Part
from controller.core.changes import IncidentPut
from controller.core.codec import decode_change, encode_change
from controller.core.incident_record import IncidentRecord
from controller.core.states import JobState
from tests.controller.core.driver import JOB, Driver

SPANS = st.lists(
    st.tuples(
        st.floats(0.0, 5000.0),
        st.one_of(st.sampled_from(accounting.PARTS), st.sampled_from(["fault", "stall"])),
        st.floats(0.0, 9000.0),
    ),
    max_size=60,
)


def _account(spans: list[tuple[float, Part | str, float]], *, ends: bool) -> tuple[Account, float]:
    """An account through these spans: (how long, what then, how long ago or how long it was)."""
    now_s = 1000.0
    account = accounting.opened(now_s)
    for lasts_s, what, ago_s in spans:
        now_s += lasts_s
        if isinstance(what, Part):
            account = accounting.moved(account, what, now_s)
        elif what == "fault":
            account = accounting.blamed(account, now_s - ago_s, now_s)
        else:
            account = accounting.stalled(account, ago_s, now_s)
    return (accounting.moved(account, None, now_s) if ends else account), now_s


@given(spans=SPANS, more_s=st.floats(0.0, 5000.0), ends=st.booleans())
def test_the_parts_always_sum_to_the_wall_time(
    spans: list[tuple[float, Part | str, float]], more_s: float, ends: bool
) -> None:
    account, now_s = _account(spans, ends=ends)
    end_s = now_s if ends else now_s + more_s
    parts = accounting.totals(account, now_s + more_s)
    assert sum(parts.values()) == pytest.approx(end_s - 1000.0, abs=1e-6)
    assert min(parts.values()) >= 0.0


@given(spans=SPANS, more_s=st.floats(0.0, 5000.0))
def test_the_last_hour_sums_to_an_hour_or_to_all_there_was(
    spans: list[tuple[float, Part | str, float]], more_s: float
) -> None:
    account, now_s = _account(spans, ends=False)
    within = accounting.window(account, now_s + more_s)
    whole_s = now_s + more_s - 1000.0
    assert sum(within.values()) == pytest.approx(min(3600.0, whole_s), abs=1e-6)
    whole = accounting.totals(account, now_s + more_s)
    assert all(within[part] <= whole[part] + 1e-6 for part in accounting.PARTS)


def _parts(driver: Driver) -> dict[Part, float]:
    return accounting.totals(driver.job().account, driver.now_s)


def test_a_fault_moves_seconds_from_productive_to_detect_and_redo_follows() -> None:
    driver = Driver().running()
    begun_s = driver.job().submitted_s
    driver.wait(100.0)
    driver.send(driver.exited(0, completed_step=50))
    assert driver.job().account.part is Part.DIAGNOSE
    driver.wait(3.0)
    driver.answer_all("/stop/")
    assert driver.job().account.part is Part.RESTORE
    driver.wait(5.0)
    driver.advanced(20, resumed_step=19)
    assert driver.job().account.part is Part.REDO
    driver.wait(7.0)
    driver.advanced(50, resumed_step=19)
    assert driver.job().account.part is Part.PRODUCTIVE
    parts = _parts(driver)
    assert sum(parts.values()) == pytest.approx(driver.now_s - begun_s)
    assert parts[Part.REDO] == pytest.approx(7.0)
    assert parts[Part.DIAGNOSE] == pytest.approx(3.0)
    incident = driver.incident()
    spent = cost.parts_s(incident, driver.now_s)
    assert incident.closed_s is not None
    assert sum(spent.values()) == pytest.approx(incident.closed_s - incident.fault_s)
    assert spent[Part.REDO] == pytest.approx(7.0)
    assert cost.steps_lost(incident) == 31


def _recovered() -> Driver:
    """A job whose worker was killed, and whose training is past that again."""
    driver = Driver().running()
    driver.wait(100.0)
    driver.send(driver.exited(0, completed_step=50))
    driver.wait(3.0)
    driver.answer_all("/stop/")
    driver.wait(5.0)
    driver.advanced(20, resumed_step=19)
    driver.wait(7.0)
    driver.advanced(50, resumed_step=19)
    return driver


def _costs(incident: IncidentRecord, now_s: float) -> list[object]:
    """All that is computed of an incident."""
    return [
        *(cost.detection_s(incident), cost.diagnosis_s(incident), cost.recovery_s(incident)),
        *(cost.lost_s(incident), cost.parts_s(incident, now_s), cost.steps_lost(incident)),
        cost.states_s(incident),
    ]


@pytest.mark.parametrize("phase", ["anything else", "suspending", "verdict", "running"])
def test_other_words_in_a_timeline_change_no_cost(phase: str) -> None:
    driver = _recovered()
    incident = driver.incident()
    costs = _costs(incident, driver.now_s)
    assert cost.diagnosis_s(incident) == pytest.approx(3.0)
    assert cost.lost_s(incident) == pytest.approx(15.0)
    assert cost.states_s(incident)[JobState.STARTING] == pytest.approx(5.0)
    said = tuple(replace(entry, phase=phase, detail="") for entry in incident.timeline)
    assert _costs(replace(incident, timeline=said), driver.now_s) == costs


def test_an_incident_of_a_journal_without_states_in_its_timeline_costs_the_same() -> None:
    driver = _recovered()
    written = json.loads(json.dumps(encode_change(IncidentPut(incident=driver.incident()))))
    for entry in written["incident"]["timeline"]:
        # As it was written before.
        del entry["state"], entry["is_verdict"]
    assert decode_change(written) == IncidentPut(incident=driver.incident())


def test_waits_for_checkpoints_are_counted_as_commits_tell_of_them() -> None:
    driver = Driver().running()

    def commit(step: int, stalled_s: float, attempt: int = 1) -> float:
        driver.wait(100.0)
        driver.send(
            ev.CheckpointCommitted(job_id=JOB, step=step, attempt=attempt, stalled_s=stalled_s)
        )
        return _parts(driver)[Part.CHECKPOINT]

    assert commit(10, 4.0) == pytest.approx(4.0)
    # So little is noted with what comes next.
    assert commit(20, 4.5) == pytest.approx(4.0)
    assert commit(30, 7.0) == pytest.approx(7.0)
    assert commit(40, 50.0, attempt=0) == pytest.approx(7.0)
    assert driver.job().account.part is Part.PRODUCTIVE


def test_the_wait_for_the_last_checkpoint_is_not_productive() -> None:
    driver = Driver().running(spares=0, last_checkpoint_s=600.0)
    driver.wait(100.0)
    for rank in (0, 1):
        driver.send(driver.exited(rank, code=0, completed_step=100))
    before = _parts(driver)
    assert driver.job().account.part is Part.CHECKPOINT
    driver.wait(40.0)
    # Some other checkpoint changes nothing of that.
    driver.send(ev.CheckpointCommitted(job_id=JOB, step=50, attempt=1, stalled_s=30.0))
    driver.wait(10.0)
    driver.commit(100)
    parts = _parts(driver)
    assert driver.job().account.ended_s is not None
    assert parts[Part.PRODUCTIVE] == before[Part.PRODUCTIVE] > 0
    assert parts[Part.CHECKPOINT] == pytest.approx(before[Part.CHECKPOINT] + 50.0)
    assert accounting.ettr(parts) == pytest.approx(parts[Part.PRODUCTIVE] / sum(parts.values()))


def test_ranks_lost_during_that_wait_are_accounted_for_as_ever() -> None:
    driver = Driver().running(spares=1, last_checkpoint_s=600.0)
    for rank in (0, 1):
        driver.send(driver.exited(rank, code=0, completed_step=100))
    driver.wait(40.0)
    driver.lose("n1")
    driver.wait(20.0)
    assert driver.job().account.part is not Part.CHECKPOINT
    assert _parts(driver)[Part.CHECKPOINT] >= 40.0
    assert sum(_parts(driver).values()) == pytest.approx(driver.now_s - driver.job().submitted_s)


def test_a_pause_is_paused_and_waiting_for_nodes_is_provision() -> None:
    driver = Driver().running()
    driver.send(ev.JobPauseRequested(job_id=JOB))
    assert driver.job().account.part is Part.PAUSED
    driver.answer_all("/stop/")
    driver.wait(60.0)
    driver.send(ev.JobResumeRequested(job_id=JOB))
    assert driver.job().account.part is Part.PROVISION
    assert _parts(driver)[Part.PAUSED] >= 60.0


def test_a_job_that_has_ended_costs_nothing_more() -> None:
    driver = Driver().running()
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer_all("/stop/")
    before = _parts(driver)
    driver.wait(500.0)
    assert _parts(driver) == before
    assert driver.job().account.part is None
