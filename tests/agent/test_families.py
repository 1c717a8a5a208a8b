"""What a worker starts ends with it, and leaves no dead process to the agent."""

from __future__ import annotations

import os
import signal

import pytest

from controller.agent.processes import process_state
from tests.agent.harness import (
    DEADLINE_S,
    AgentProcess,
    FakeController,
    start_command,
    start_job,
    stop_command,
    wait_for,
)


def family_of(agent: AgentProcess, rank: int) -> list[int]:
    """The processes that a rank has started, when it has said so: its child, and a daemon."""
    path = agent.data_dir / f"family-{rank}"

    def find() -> list[int] | None:
        text = path.read_text() if path.exists() else ""
        return [int(pid) for pid in text.split()] if text.endswith("\n") else None

    return wait_for(find, "a family")


def is_gone(pids: list[int]) -> bool:
    """Whether nothing of these is left, not even a dead process that nobody has reaped."""
    return not any(process_state(pid) for pid in pids)


@pytest.mark.parametrize("end", ["killed", "stopped", "agent ends", "agent is killed"])
def test_what_a_worker_has_started_ends_with_it(
    controller: FakeController, agent: AgentProcess, end: str
) -> None:
    agent.behave(rank0="family")
    start_job(controller)
    family = family_of(agent, 0)
    assert len(family) == 3
    assert not is_gone(family)
    match end:
        case "killed":
            os.kill(agent.worker_pid(1, 0), signal.SIGKILL)
            controller.exit_of("job", 1, 0)
        case "stopped":
            assert controller.result(controller.command(stop_command(1))).ok
            # Its own group is gone by then; a daemon is found at the next look.
            assert is_gone(family[:2])
        case "agent ends":
            agent.process.terminate()
            assert agent.process.wait(DEADLINE_S) == 0
            assert is_gone(family)
        case _:
            agent.process.kill()
            agent.process.wait()
            # The standby takes the groups along; a daemon of a killed agent is nobody's.
            wait_for(lambda: is_gone(family[:2]), "the end of the group")
            os.kill(family[2], signal.SIGKILL)
            return
    wait_for(lambda: is_gone(family), "the end of the family")


def test_daemon_of_a_worker_that_lives_is_left_alone(
    controller: FakeController, agent: AgentProcess
) -> None:
    agent.behave(rank0="family", rank1="train")
    start_job(controller)
    family = family_of(agent, 0)
    os.kill(agent.worker_pid(1, 1), signal.SIGKILL)
    controller.exit_of("job", 1, 1)
    # The agent has looked at its children twice since.
    dead = controller.heartbeats()
    wait_for(lambda: len(controller.heartbeats()) > len(dead) + 12, "two more looks")
    assert [process_state(pid) for pid in family] != ["", "", ""]
    assert not is_gone(family[2:])
    assert controller.result(controller.command(stop_command(1))).ok
    wait_for(lambda: is_gone(family), "the end of the family")
    agent.behave()
    assert controller.result(controller.command(start_command(2))).ok
    controller.progress("job", 2)
