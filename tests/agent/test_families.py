"""What a worker starts ends with it, and leaves no dead process to the agent.

With a cgroup for each worker where this machine permits that, and without.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from controller.agent.workers.processes import process_state
from tests.agent.conftest import StartAgent
from tests.agent.harness import (
    DEADLINE_S,
    AgentProcess,
    FakeController,
    start_command,
    start_job,
    stop_command,
    wait_for,
)

SAYS = "cgroups of workers:"


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


def has_cgroups(agent: AgentProcess) -> bool:
    """Whether its workers have cgroups, by what it says when it starts."""
    line = wait_for(
        lambda: next((each for each in agent.log.read_text().splitlines() if SAYS in each), None),
        "a word about cgroups",
    )
    return f"{SAYS} below" in line


@pytest.fixture(params=["cgroups", "no cgroups"])
def agent(
    request: pytest.FixtureRequest, controller: FakeController, start_agent: StartAgent
) -> AgentProcess:
    is_with = request.param == "cgroups"
    process = start_agent(controller.start(), *([] if is_with else ["--no-cgroups"]))
    if is_with and not has_cgroups(process):
        pytest.skip("this machine has no cgroup v2 that may be written to")
    return process


def is_alive(pid: int) -> bool:
    return process_state(pid) not in ("", "Z", "X")


@pytest.mark.parametrize("end", ["killed", "stopped", "agent ends", "agent is killed"])
def test_what_a_worker_has_started_ends_with_it(
    controller: FakeController, agent: AgentProcess, end: str
) -> None:
    is_whole = has_cgroups(agent)
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
            # The answer comes after all of it, so that no attempt finds it there.
            assert is_gone(family)
        case "agent ends":
            agent.process.terminate()
            assert agent.process.wait(DEADLINE_S) == 0
            assert is_gone(family)
        case _:
            agent.process.kill()
            agent.process.wait()
            # The standby takes the groups along; without a cgroup, a daemon of a killed agent is
            # nobody's.
            if is_whole:
                wait_for(lambda: not any(map(is_alive, family)), "the end of the family")
                return
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


def test_a_fork_without_an_exec_that_left_its_group_ends_with_its_worker_alone(
    controller: FakeController, agent: AgentProcess
) -> None:
    """It has no mark of its worker: without a cgroup it lives while any worker does."""
    agent.behave(rank0="forked daemon", rank1="train")
    start_job(controller)
    daemon = family_of(agent, 0)[0]
    os.kill(agent.worker_pid(1, 0), signal.SIGKILL)
    controller.exit_of("job", 1, 0)
    if has_cgroups(agent):
        wait_for(lambda: not is_alive(daemon), "the end of the daemon")
    else:
        assert is_alive(daemon)
    assert process_state(agent.worker_pid(1, 1)) not in ("", "Z")
    assert controller.result(controller.command(stop_command(1))).ok
    wait_for(lambda: not is_alive(daemon), "the end of the daemon with the last worker")


def test_no_cgroup_outlives_its_worker_or_the_agent_after_the_one_that_was_killed(
    controller: FakeController, start_agent: StartAgent
) -> None:
    port = controller.start()
    first = start_agent(port)
    if not has_cgroups(first):
        pytest.skip("this machine has no cgroup v2 that may be written to")
    first.behave(rank0="family")
    start_job(controller)
    family = family_of(first, 0)
    groups = {cgroup_of(pid) for pid in family}
    assert len(groups) == 1, "all of a worker's are in its group"
    (group,) = groups
    assert group == cgroup_of(first.worker_pid(1, 0)) != cgroup_of(first.worker_pid(1, 1))
    assert group != cgroup_of(first.process.pid)
    # Nobody is left to end them but the next agent.
    os.kill(first.standby_pid(), signal.SIGSTOP)
    first.process.kill()
    first.process.wait()
    second = start_agent(port)
    assert has_cgroups(second)
    wait_for(lambda: not any(map(is_alive, family)), "the end of the family")
    second.process.terminate()
    assert second.process.wait(DEADLINE_S) == 0
    mount = next(
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if " - cgroup2 " in line
    )
    own = cgroup_of(os.getpid()).lstrip("/")
    prefix = Path(group).name.rpartition("-")[0]
    assert not list((Path(mount) / own).glob(f"{prefix}-*"))


def cgroup_of(pid: int) -> str:
    """The path of a process's cgroup of version 2."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
