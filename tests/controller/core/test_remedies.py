"""What a user can change is named where a fault was for want of memory."""

from __future__ import annotations

import pytest

from controller.core.states import JobState
from tests.controller.core.driver import Driver


@pytest.mark.parametrize(
    ("fault_class", "fields"),
    [
        ("cuda_oom", ("parallel.recompute", "parallel.micro_batch", "parallel.zero.level")),
        (
            "oom_host",
            ("resources.workers_per_node", "checkpoint.replicas: 0", "parallel.tp"),
        ),
    ],
)
def test_out_of_memory_names_the_fields_of_the_spec_that_help(
    fault_class: str, fields: tuple[str, ...]
) -> None:
    driver = Driver().running()
    for time in range(2):
        driver.send(driver.exited(1, fault_class=fault_class, detail="no memory", fingerprint="f"))
        driver.answer_all("/stop/")
        if driver.job().state is JobState.DIAGNOSING:
            driver.searched()
        reason = driver.incident(time + 1).reason
        assert "no memory" in reason
        assert all(reason.count(field) == 1 for field in fields), reason
        if driver.job().state is JobState.FAILED:
            assert all(field in driver.job().reason for field in fields)
            return
        driver.answer_all("/start/")
        driver.advanced(1)


def test_a_fault_of_another_kind_names_none() -> None:
    driver = Driver().running()
    driver.send(driver.exited())
    driver.answer_all("/stop/")
    assert "memory" not in driver.incident().reason
