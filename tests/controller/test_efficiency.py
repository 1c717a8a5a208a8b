"""How long a job will take, from its plan, its last step and the pace of its steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.records import JobRecord
from controller.core.states import JobState
from controller.efficiency import Peak, peak_of, time_left_s
from controller.store.curves import StepRow
from outlast.devices import MEASURED
from tests.controller.core.driver import Driver


@pytest.fixture
def job() -> JobRecord:
    found = Driver().running().job()
    return replace(found, plan=replace(found.plan, total_steps=200))


def row(job: JobRecord, step: int) -> StepRow:
    return StepRow(
        job=job.job_id,
        step=step,
        attempt=1,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=100,
        duration_s=0.1,
        at_s=1.0,
    )


def test_time_left_is_that_of_the_steps_to_do(job: JobRecord) -> None:
    assert time_left_s(job, row(job, 50), 0.5) == 75.0
    assert time_left_s(job, row(job, 199), 0.5) == 0.5


@pytest.mark.parametrize("state", [each for each in JobState if each is not JobState.RUNNING])
def test_a_job_that_stands_still_has_no_time_left(job: JobRecord, state: JobState) -> None:
    assert time_left_s(replace(job, state=state), row(job, 50), 0.5) is None


def test_neither_has_one_that_has_done_its_steps_nor_a_script(job: JobRecord) -> None:
    assert time_left_s(job, row(job, 200), 0.5) is None
    script = replace(job, plan=replace(job.plan, total_steps=None))
    assert time_left_s(script, row(script, 50), 0.5) is None


def test_without_a_pace_nothing_is_promised(job: JobRecord) -> None:
    assert time_left_s(job, row(job, 50), None) is None


@pytest.fixture
def in_float32(job: JobRecord) -> JobRecord:
    return replace(job, spec_json='{"name": "a", "precision": "fp32"}')


def test_the_peak_is_what_the_check_has_measured_where_no_device_is_known(
    in_float32: JobRecord,
) -> None:
    nodes = [node for node in in_float32.nodes if node is not None]
    known = dict.fromkeys(nodes, 5e10)
    ranks = len(nodes) * in_float32.plan.workers_per_node
    assert peak_of(in_float32, known) == Peak(name=MEASURED, flops_per_s=ranks * 5e10)
    # Of all nodes, or of none.
    assert peak_of(in_float32, {nodes[0]: 5e10}) is None
    assert peak_of(in_float32, {}) is None
    # The check is in float32.
    other = replace(in_float32, spec_json='{"name": "a", "precision": "bf16"}')
    assert peak_of(other, known) is None


def test_a_device_with_a_data_sheet_goes_before_it(in_float32: JobRecord) -> None:
    known = replace(in_float32, environment="device NVIDIA H100 80GB HBM3, torch 2.13.0")
    peak = peak_of(known, dict.fromkeys((n for n in in_float32.nodes if n is not None), 5e10))
    assert peak is not None
    assert peak.name != MEASURED
