"""What comes in from agents, in the machine's words."""

from __future__ import annotations

from controller import convert
from controller.core.states import JobState
from outlast.ids import NodeId
from outlast.v1 import agents_pb2
from tests.controller.core.driver import Driver


def test_a_suite_answered_from_memory_is_no_verdict_and_asked_for_again() -> None:
    """What it found was lost with the agent that ran it, and may have been a failure."""
    driver = Driver()
    driver.join("n1")
    driver.join("n2")
    driver.submit()
    assert driver.job().state is JobState.PREFLIGHT
    repeated = agents_pb2.CommandResult(command_id="n1/suite/1", ok=True)
    lines = driver.send(convert.command_finished(NodeId("n1"), repeated))
    assert "open n1/suite/2" in lines
    assert "n1" in driver.job().unchecked
    repeated.command_id = "n1/suite/2"
    repeated.findings.add(test="device", verdict="pass")
    driver.send(convert.command_finished(NodeId("n1"), repeated))
    assert driver.job().unchecked == ("n2",)
