"""An event costs as much after a thousand jobs as after ten."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

from controller.core import events as ev
from controller.core.changes import IncidentPut, JobPut, fold
from controller.core.node_events import NodeDisconnected, NodeHeard, NodeLate
from controller.core.states import JobState
from outlast.ids import JobId, NodeId, incident_id
from tests.controller.core.driver import JOB, Driver


def _ended() -> Driver:
    """A job that had a fault and was cancelled, and that no node keeps anything of."""
    driver = Driver().running()
    driver.send(driver.exited(0))
    driver.answer_all("/stop/")
    driver.send(ev.JobCancelRequested(job_id=JOB))
    driver.answer_all("/stop/")
    driver.answer_all("/forget/")
    assert (driver.job().state, driver.job().held_by) == (JobState.CANCELLED, ())
    return driver


def _after(num_jobs: int) -> Driver:
    """A job that trains after so many others."""
    template = _ended()
    changes = []
    for number in range(num_jobs):
        name = JobId(f"old-{number}")
        changes.append(JobPut(job=replace(template.job(), job_id=name, request_id=name)))
        incident = replace(template.incident(), job=name, incident=incident_id(name, 1))
        changes.append(IncidentPut(incident=incident))
    return Driver(fold(changes)).running()


def _lines_run(driver: Driver) -> int:
    """Lines of Python that common events take, each iteration of a loop among them."""
    num_lines = 0

    def counting(_frame: FrameType, what: str, _argument: object) -> Any:
        nonlocal num_lines
        num_lines += what == "line"
        return counting

    events = [
        NodeLate(node=NodeId("n1"), silent_s=5.0),
        NodeHeard(node=NodeId("n1")),
        ev.CheckpointCommitted(job_id=JOB, step=3),
        ev.TimePassed(),
        driver.exited(0),
        NodeDisconnected(node=NodeId("n2")),
    ]
    before = sys.gettrace()
    sys.settrace(counting)
    try:
        for event in events:
            driver.machine.handle(event, driver.now_s)
            driver.machine.wake_at()
    finally:
        sys.settrace(before)
    return num_lines


def test_ended_jobs_cost_nothing_per_event() -> None:
    """The machine went through all jobs that ever were, several times for each event."""
    few, many = _lines_run(_after(10)), _lines_run(_after(1_000))
    assert many == few > 100
