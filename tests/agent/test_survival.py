"""What outlives what: the controller, the agent, its standby process and the workers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.worker_contract import WorkerExitCode
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


def test_events_of_a_controllers_absence_are_sent_again_and_workers_go_on(
    controller: FakeController, start_agent: StartAgent, tmp_path: Path
) -> None:
    address_file = tmp_path / "controller.json"
    controller.acknowledges = False
    port = controller.start()
    agent = start_agent(port, "--controller-file", str(address_file))
    start_job(controller)
    controller.progress("job", 1)
    pids = [agent.worker_pid(1, rank) for rank in (0, 1)]
    heard = seqs(controller)
    controller.stop()
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pids[1]}").exists(), "a dead worker")

    successor = FakeController()
    address_file.write_text(json.dumps({"grpc": f"127.0.0.1:{successor.start()}"}))
    try:
        assert successor.exit_of("job", 1, 1).code == -signal.SIGKILL
        # Nothing was acknowledged, so everything comes again, in order and without gaps.
        wait_for(lambda: seqs(successor)[-1] > heard[-1] + 2, "new events")
        assert seqs(successor) == list(range(1, len(seqs(successor)) + 1))
        hello = successor.hellos[0]
        assert hello.incarnation == controller.hellos[0].incarnation
        statuses = {status.rank: status for status in hello.worker_statuses}
        assert statuses[0].running
        # Its end is among the events that come, after the steps that it completed.
        assert statuses[1].running
        told = [event.worker_exited.rank for event in successor.events("worker_exited")]
        assert told == [1]
        successor.drop_connection()
        wait_for(lambda: len(successor.hellos) == 2, "a second hello")
        statuses = {status.rank: status for status in successor.hellos[1].worker_statuses}
        assert statuses[0].running
        assert statuses[1].exit.code == -signal.SIGKILL
        assert Path(f"/proc/{pids[0]}").exists()
    finally:
        successor.stop()


def test_acknowledged_events_are_not_sent_again(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)
    controller.result(controller.command(stop_command(1)))
    last = seqs(controller)[-1]
    # The order of a stream: an answer to this shows that the acks before it were read.
    controller.result(controller.command(stop_command(1)))
    before = len(controller.received)
    controller.drop_connection()
    wait_for(lambda: len(controller.hellos) == 2, "a second hello")
    controller.result(controller.command(stop_command(1)))
    again = [
        message.event.seq
        for _, message in controller.received[before:]
        if message.WhichOneof("kind") == "event"
    ]
    assert min(again) > last


def test_workers_are_stopped_after_too_long_without_a_controller(
    start_agent: StartAgent,
) -> None:
    controller = FakeController(absence_limit_s=0.5)
    agent = start_agent(controller.start())
    try:
        start_job(controller)
        controller.progress("job", 1)
        pids = [agent.worker_pid(1, rank) for rank in (0, 1)]
    finally:
        controller.stop()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "workers stopped")
    assert agent.process.poll() is None


def test_workers_outlive_the_standby_process_and_a_new_one_takes_over(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)
    pids = [agent.worker_pid(1, rank) for rank in (0, 1)]
    standby = agent.standby_pid()
    os.kill(standby, signal.SIGKILL)
    wait_for(lambda: agent.standby_pid() != standby, "another standby process")
    os.kill(pids[0], signal.SIGKILL)
    assert controller.exit_of("job", 1, 0).code == -signal.SIGKILL
    os.kill(pids[1], signal.SIGTERM)
    assert controller.exit_of("job", 1, 1).code == WorkerExitCode.STOPPED
    start_job(controller, attempt=2)
    controller.progress("job", 2)


def test_worker_end_is_noticed_while_the_standby_process_is_stuck(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)
    os.kill(agent.standby_pid(), signal.SIGSTOP)
    os.kill(agent.worker_pid(1, 0), signal.SIGTERM)
    assert controller.exit_of("job", 1, 0).code == WorkerExitCode.STOPPED


def test_killed_agent_leaves_no_process(controller: FakeController, agent: AgentProcess) -> None:
    agent.behave(rank0="ignore-term", rank1="ignore-term")
    start_job(controller)
    controller.progress("job", 1)
    assert len(agent.pids()) == 4
    agent.process.kill()
    agent.process.wait()
    wait_for(lambda: not agent.pids(), "an empty session")


def test_sigterm_leaves_no_process_and_exits_with_0(
    controller: FakeController, agent: AgentProcess
) -> None:
    agent.behave(rank0="ignore-term", rank1="ignore-term")
    start_job(controller)
    controller.progress("job", 1)
    agent.process.terminate()
    assert agent.process.wait(DEADLINE_S) == 0
    assert agent.pids() == []


def test_restarted_agent_kills_what_is_left_and_remembers_its_commands(
    controller: FakeController, start_agent: StartAgent
) -> None:
    port = controller.start()
    first = start_agent(port)
    controller.result(controller.command(start_command(1, command_id="once")))
    controller.progress("job", 1)
    workers = [first.worker_pid(1, rank) for rank in (0, 1)]
    kept = first.memory_dir / "job" / "rank-00000" / "slot-0"
    kept.write_bytes(b"state")
    # Both die in the same instant: nobody is left to kill the workers.
    os.kill(first.standby_pid(), signal.SIGSTOP)
    first.process.kill()
    os.kill(first.standby_pid(), signal.SIGKILL)
    first.process.wait()
    assert all(Path(f"/proc/{pid}").exists() for pid in workers)

    start_agent(port)
    wait_for(lambda: len(controller.hellos) == 2, "a hello of the second agent")
    assert not set(first.pids()) & set(workers)
    assert controller.hellos[1].incarnation != controller.hellos[0].incarnation
    assert not controller.hellos[1].worker_statuses
    assert kept.read_bytes() == b"state"
    before = len(controller.received)
    controller.command(start_command(1, command_id="once"))
    wait_for(lambda: controller.events("command_result", before), "the stored answer")
    assert controller.events("command_result", before)[0].command_result.ok
    stale = controller.result(controller.command(start_command(1)))
    assert stale.error_kind == "stale"


def test_second_agent_on_the_same_folder_is_refused(
    controller: FakeController, agent: AgentProcess, start_agent: StartAgent
) -> None:
    wait_for(lambda: controller.hellos, "a hello")
    second = start_agent(1)
    assert second.process.wait(DEADLINE_S) == 2
    assert "another agent runs on" in second.log.read_text()
    assert agent.process.poll() is None


def seqs(controller: FakeController) -> list[int]:
    return [
        message.event.seq
        for _, message in controller.received
        if message.WhichOneof("kind") == "event"
    ]


@pytest.fixture
def takes_hangups() -> Iterator[None]:
    """Agents that start from here on: where the tests run under nohup, they would ignore them."""
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("takes_hangups")
def test_agent_whose_terminal_closes_ends_in_order(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)
    os.kill(agent.process.pid, signal.SIGHUP)
    assert agent.process.wait(DEADLINE_S) == 0
    assert agent.pids() == []
    assert "agent stopped" in agent.log.read_text()


def test_agent_that_a_newer_one_of_its_name_has_replaced_stops_its_workers_and_ends(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    controller.progress("job", 1)
    controller.is_stale = True
    controller.drop_connection()
    assert agent.process.wait(DEADLINE_S) == 2
    assert agent.pids() == []
    said = agent.log.read_text().splitlines()[-1]
    assert said.startswith("outlast agent: another agent called n0 has joined the controller")
    assert "--node" in said
