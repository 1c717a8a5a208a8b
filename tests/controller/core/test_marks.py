"""What tells a job's checkpoints from those of another job of the same id."""

from __future__ import annotations

from controller.core.records import JobRecord
from tests.controller.core.driver import JOB, Driver


def submitted(after_s: float) -> JobRecord:
    driver = Driver()
    driver.now_s += after_s
    driver.submit()
    return driver.machine.state.jobs[JOB]


def test_jobs_of_two_controllers_have_two_marks_though_ids_and_requests_are_equal() -> None:
    first, second = submitted(0.0), submitted(0.5)
    assert first.job_id == second.job_id
    assert first.request_id == second.request_id
    assert first.mark != second.mark
    assert first.mark == submitted(0.0).mark
