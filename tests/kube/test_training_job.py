"""What is done about a TrainingJob, and what its status says, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from controller.core.frozen import replace
from controller.core.kinds import Wanted
from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.kube.training_job import (
    OWNER,
    Step,
    TrainingJob,
    event_about,
    has_news,
    read_training_job,
    refused,
    request_id,
    status_of,
    step_for,
    waits,
)
from outlast.ids import JobId
from tests.controller.core.driver import make_plan

NOW_S = 1_000_000.0
LATER_S = NOW_S + 60.0


def wanted(status: dict[str, Any] | None = None, **spec: Any) -> TrainingJob:
    item = {
        "metadata": {"name": "llama", "uid": "u1", "generation": 3},
        "spec": {"steps": 100, **spec},
        "status": status or {},
    }
    return read_training_job(item)


def job(state: JobState = JobState.RUNNING, **changes: Any) -> JobRecord:
    record = JobRecord(
        job_id=JobId("llama-1"),
        name="llama",
        request_id=request_id("ml", "u1"),
        owner=OWNER,
        spec_json="{}",
        checkpoint_url="",
        plan=make_plan(),
        submitted_s=NOW_S,
        state=state,
        since_s=NOW_S,
        reason="it trains",
        high_step=7,
    )
    return replace(record, **changes)


def test_a_spec_has_the_name_of_its_object_unless_it_says_another() -> None:
    assert wanted().document == {"name": "llama", "steps": 100}
    assert wanted(name="other").document["name"] == "other"
    assert wanted(suspend=True).document == wanted().document


@pytest.mark.parametrize("broken", [{}, {"spec": None}, {"spec": [1], "status": "x"}])
def test_an_object_that_makes_no_sense_is_still_there(broken: dict[str, Any]) -> None:
    found = read_training_job({"metadata": {"name": "llama", "uid": "u1"}, **broken})
    assert (found.name, found.uid, found.suspend) == ("llama", "u1", False)
    assert step_for(found, None) is Step.SUBMIT


def test_it_is_submitted_once() -> None:
    first = wanted()
    assert step_for(first, None) is Step.SUBMIT
    assert step_for(first, job()) is None
    told = status_of(first, job(), NOW_S)
    # Ended jobs are forgotten after a while.
    assert step_for(wanted(told), None) is None


def test_a_refused_spec_is_tried_again_when_it_has_changed() -> None:
    told = refused(wanted(steps=-1), "steps: is -1; allowed: 1 or more", NOW_S)
    assert (told["state"], told["observedGeneration"]) == ("INVALID", 3)
    assert step_for(wanted(told, steps=-1), None) is None
    assert step_for(wanted(told, steps=1), None) is Step.SUBMIT
    # And then it is the spec of the job.
    assert "changed" not in status_of(wanted(told, steps=1), job(), NOW_S)["reason"]


def test_a_suspended_one_waits_to_be_submitted() -> None:
    held = wanted(suspend=True)
    assert step_for(held, None) is None
    told = status_of(held, None, NOW_S)
    assert (told["state"], told["suspended"]) == ("SUSPENDED", True)
    assert step_for(wanted(told), None) is Step.SUBMIT


def test_suspend_pauses_the_job_and_lets_it_go_on() -> None:
    told = status_of(wanted(), job(), NOW_S)
    assert step_for(wanted(told, suspend=True), job()) is Step.PAUSE
    paused = job(JobState.PAUSED, wanted=Wanted.PAUSE)
    told = status_of(wanted(told, suspend=True), paused, NOW_S)
    assert told["suspended"]
    assert step_for(wanted(told, suspend=True), paused) is None
    assert step_for(wanted(told), paused) is Step.RESUME


def test_what_a_person_does_is_left_as_it_is() -> None:
    told = status_of(wanted(), job(), NOW_S)
    paused = job(JobState.PAUSED, wanted=Wanted.PAUSE)
    assert step_for(wanted(told), paused) is None
    told = status_of(wanted(told), paused, NOW_S)
    assert step_for(wanted(told), paused) is None
    # The object asks for a pause, too, and then takes that back.
    told = status_of(wanted(told, suspend=True), paused, NOW_S)
    assert step_for(wanted(told), paused) is Step.RESUME
    # A person lets it go on though the object says `suspend`.
    told = status_of(wanted(told, suspend=True), paused, NOW_S)
    assert step_for(wanted(told, suspend=True), job()) is None


@pytest.mark.parametrize(
    "ended", [job(JobState.SUCCEEDED), job(JobState.CANCELLED), job(wanted=Wanted.CANCEL)]
)
def test_nothing_is_done_about_what_has_ended(ended: JobRecord) -> None:
    told = status_of(wanted(), job(), NOW_S)
    assert step_for(wanted(told, suspend=True), ended) is None


def test_a_changed_spec_is_said_to_be_of_no_effect() -> None:
    told = status_of(wanted(), job(), NOW_S)
    told = status_of(wanted(told, steps=200), job(), NOW_S)
    assert told["reason"].startswith("it trains; its spec has changed since it was submitted")
    # Until it is as it was.
    assert status_of(wanted(told), job(), NOW_S)["reason"] == "it trains"


def test_the_status_says_how_far_a_job_is() -> None:
    told = status_of(wanted(), job(), NOW_S)
    assert (told["jobId"], told["state"], told["step"], told["steps"]) == (
        *("llama-1", "RUNNING"),
        *(7, 100),
    )
    assert told["startTime"] == "1970-01-12T13:46:40Z"
    failed = job(JobState.FAILED, error="Traceback\nValueError: no", finished_s=LATER_S)
    told = status_of(wanted(told), failed, LATER_S)
    assert (told["reason"], told["completionTime"]) == ("ValueError: no", "1970-01-12T13:47:40Z")


def test_conditions_have_the_time_of_their_last_change() -> None:
    def times(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
        return {
            each["type"]: (each["status"], each["lastTransitionTime"])
            for each in status["conditions"]
        }

    first, later = "1970-01-12T13:46:40Z", "1970-01-12T13:47:40Z"
    told = status_of(wanted(), job(), NOW_S)
    assert times(told) == {
        "Running": ("True", first),
        "Succeeded": ("False", first),
        "Failed": ("False", first),
    }
    told = status_of(wanted(told), job(JobState.SUCCEEDED), LATER_S)
    assert times(told) == {
        "Running": ("False", later),
        "Succeeded": ("True", later),
        "Failed": ("False", first),
    }


def test_a_job_that_the_controller_has_lost_is_not_begun_again_by_itself() -> None:
    told = status_of(wanted(), job(), NOW_S)
    lost = status_of(wanted(told), None, LATER_S)
    assert lost["state"] == "UNKNOWN"
    assert "does not know job llama-1 any more" in lost["reason"]
    assert step_for(wanted(lost), None) is None
    assert status_of(wanted(lost), None, LATER_S) == lost
    # One that had ended by then stays as it was.
    ended = status_of(wanted(told), job(JobState.SUCCEEDED), NOW_S)
    assert status_of(wanted(ended), None, LATER_S) == ended


def test_steps_alone_are_news_now_and_then() -> None:
    before = status_of(wanted(), job(), NOW_S)
    further = status_of(wanted(before), job(high_step=8), LATER_S)
    assert not has_news(before, further, is_step_due=False)
    assert has_news(before, further, is_step_due=True)
    assert not has_news(before, before, is_step_due=True)
    restarted = status_of(wanted(before), job(restarts=1), LATER_S)
    assert has_news(before, restarted, is_step_due=False)


def test_a_new_state_is_told_as_an_event() -> None:
    told = status_of(wanted(), job(), NOW_S)
    event = event_about(wanted(), "ml", told, NOW_S)
    assert event is not None
    assert (event["reason"], event["type"]) == ("Running", "Normal")
    assert event["message"] == "it trains"
    assert event["involvedObject"]["uid"] == "u1"
    assert event_about(wanted(told), "ml", told, NOW_S) is None
    bad = refused(wanted(), "steps: is -1", NOW_S)
    event = event_about(wanted(), "ml", bad, NOW_S)
    assert event is not None
    assert (event["reason"], event["type"]) == ("Invalid", "Warning")


def test_what_was_written_for_another_object_of_the_name_is_not_its_own() -> None:
    theirs = {**status_of(wanted(), job(), NOW_S), "uid": "u0"}
    found = wanted(theirs)
    assert step_for(found, None) is Step.SUBMIT
    # And all of it goes with the next write.
    assert set(found.foreign) == set(theirs)


def test_one_whose_name_is_taken_waits_and_is_tried_again() -> None:
    told = waits(wanted(), "name: 'llama' is the name of job llama-0", NOW_S)
    assert told["state"] == "WAITING"
    assert step_for(wanted(told), None) is Step.SUBMIT
    event = event_about(wanted(), "ml", told, NOW_S)
    assert event is not None
    assert event["type"] == "Normal"
