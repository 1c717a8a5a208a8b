"""Numeric environments: what an attempt ran in is recorded, and what changed is said."""

from __future__ import annotations

from controller.core import events as ev
from controller.core.environments import EnvironmentTable, device_in
from outlast.ids import Attempt, NodeId
from tests.controller.core.driver import JOB, Driver

N1, N2 = NodeId("n1"), NodeId("n2")
OLD = {"torch": "2.13.0", "device": "x86_64"}
NEW = {"torch": "2.14.0", "device": "x86_64"}


def test_environment_of_rank_0_speaks_for_the_attempt_and_others_are_compared() -> None:
    job, table = Driver().running().job(), EnvironmentTable()
    table.reported(JOB, Attempt(1), N2, NEW, ())
    table.reported(JOB, Attempt(1), N1, OLD, ("numpy 1 is now 2",))
    assert table.of(job) == "device x86_64, torch 2.13.0"
    assert table.changes(job) == (
        "n1: numpy 1 is now 2",
        "n2: torch is 2.14.0, and 2.13.0 on n1",
    )


def test_what_an_older_attempt_said_is_dropped() -> None:
    job, table = Driver().running().job(), EnvironmentTable()
    table.reported(JOB, Attempt(1), N1, OLD, ())
    table.reported(JOB, Attempt(0), N1, NEW, ("late",))
    assert (table.of(job), table.changes(job)) == ("device x86_64, torch 2.13.0", ())
    assert device_in(table.of(job)) == "x86_64"
    assert device_in("cuda 13.0, device NVIDIA H200 NVL, nccl 2.28.9") == "NVIDIA H200 NVL"
    assert device_in("torch 2.13.0") == ""
    table.reported(JOB, Attempt(2), N1, NEW, ("early",))
    assert (table.of(job), table.changes(job)) == ("", ())
    table.forget(JOB)
    assert table.of(job) == ""


def test_change_is_kept_with_the_job_noted_in_the_incident_and_told_once() -> None:
    driver = Driver().running()
    driver.send(driver.exited(0))
    driver.answer_all("/stop/")
    job = driver.job()
    first = ev.JobAdvanced(
        job_id=JOB,
        attempt=job.attempt,
        completed_step=8,
        resumed_step=7,
        at_s=driver.now_s,
        environment="torch 2.14.0",
        environment_changes=("n2: torch 2.13.0 is now 2.14.0",),
        data_left_out=("text cut at 4,096 of 10,000 bytes of /data",),
        num_samples=4_096,
    )
    lines = driver.send(first)
    assert lines.count("alert") == 1
    job = driver.job()
    assert job.environment == "torch 2.14.0"
    assert job.num_samples == 4_096
    assert job.data_left_out == ("text cut at 4,096 of 10,000 bytes of /data",)
    assert job.environment_changes == ("since step 8 (attempt 2): n2: torch 2.13.0 is now 2.14.0",)
    assert [entry.detail for entry in driver.incident().timeline if entry.phase == "environment"]
    assert "alert" not in driver.send(first)
