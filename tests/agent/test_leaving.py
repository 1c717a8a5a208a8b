"""An agent that is asked to end says so, to the controller and to the next agent on its node."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.agent.conftest import StartAgent
from tests.agent.harness import AgentProcess, FakeController, start_job, wait_for

DEADLINE_S = 60.0


def end(agent: AgentProcess, number: signal.Signals) -> None:
    agent.process.send_signal(number)
    agent.process.wait(DEADLINE_S)


def successor(controller: FakeController, start_agent: StartAgent, port: int) -> str:
    """The incarnation that the next agent names as its predecessor."""
    before = len(controller.hellos)
    start_agent(port)
    wait_for(lambda: len(controller.hellos) > before, "the next hello", DEADLINE_S)
    return controller.hellos[-1].predecessor


def test_the_goodbye_is_heard_before_a_worker_is_stopped_and_the_next_agent_repeats_it(
    controller: FakeController, start_agent: StartAgent
) -> None:
    port = controller.start()
    agent = start_agent(port)
    start_job(controller)
    worker = agent.worker_pid(1, 0)
    controller.acknowledges = False
    agent.process.send_signal(signal.SIGTERM)
    wait_for(lambda: controller.events("goodbye"), "the goodbye")
    assert Path(f"/proc/{worker}").exists(), "it waits for the acknowledgement, within a limit"
    assert agent.process.wait(DEADLINE_S) == 0
    first = controller.hellos[0].incarnation
    (goodbye,) = controller.events("goodbye")
    assert goodbye.goodbye.incarnation == first
    controller.acknowledges = True
    assert successor(controller, start_agent, port) == first


def test_an_agent_that_is_killed_leaves_no_word_nor_that_of_an_older_one(
    controller: FakeController, start_agent: StartAgent
) -> None:
    port = controller.start()
    end(start_agent(port), signal.SIGTERM)
    agent = start_agent(port)
    start_job(controller)
    end(agent, signal.SIGKILL)
    assert successor(controller, start_agent, port) == ""


def test_an_agent_whose_controller_went_first_leaves_word_for_the_next_one(
    controller: FakeController, start_agent: StartAgent
) -> None:
    port = controller.start()
    agent = start_agent(port)
    start_job(controller)
    controller.stop()
    end(agent, signal.SIGTERM)
    second = FakeController()
    try:
        found = successor(second, start_agent, second.start())
    finally:
        second.stop()
    assert found == controller.hellos[0].incarnation
