"""Programs forked from the standby process: as if they had been started by themselves."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.agent.workers import standby_link
from controller.agent.workers.forked_program import Program
from controller.agent.workers.processes import child_pids, process_state, wait_gone
from controller.agent.workers.programs import RunningProgram, Standby, start_program
from controller.agent.workers.standby_events import StandbyError
from controller.agent.workers.standby_link import StandbyLink
from outlast.v1 import agents_pb2
from tests.agent.harness import DEADLINE_S, AgentProcess, FakeController, start_job, wait_for
from tests.agent.standbys import NoStandby, inheriting, running

FACTS = "tests.agent.program_facts"
FAKE = "tests.agent.fake_runner"
# Small, and nothing of ours imports it.
RARE = "colorsys"


@pytest.fixture(autouse=True)
def own_children() -> Iterator[Callable[[], list[int]]]:
    """Children of this process that came with this test: others' may be there before."""
    with inheriting():
        before = frozenset(child_pids())
        yield lambda: [pid for pid in child_pids() if pid not in before]


async def facts_of(standby: Standby, folder: Path, code: int = 0) -> dict[str, Any]:
    """What the program found, after it has ended as it was told to."""
    log = folder / "program.log"
    program = await start_program(standby, FACTS, (str(code), "two words"), log)
    os.write(program.stdin.fileno(), b"a line\n")
    line = await asyncio.to_thread(program.stdout.readall)
    assert await program.ended() == code
    await program.kill()
    program.close()
    assert log.read_text().endswith("to the log\n")
    found = json.loads(line or b"{}")
    assert isinstance(found, dict)
    return found


async def only_child(pid: int | None, own_children: Callable[[], list[int]]) -> None:
    """Wait until there is no other child."""
    async with asyncio.timeout(DEADLINE_S):
        while own_children() != [pid]:
            await asyncio.sleep(0.001)


async def fake(standby: Standby, folder: Path) -> RunningProgram:
    return await start_program(standby, FAKE, ("--node", "n0"), folder / "program.log")


def test_forked_program_finds_what_a_started_one_finds(tmp_path: Path) -> None:
    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        async with running(tmp_path) as (link, _):
            return await facts_of(link, tmp_path, 7), await facts_of(NoStandby(), tmp_path, 7)

    forked, started = asyncio.run(run())
    assert forked["same"] == started["same"]
    same = forked["same"]
    assert same["arguments"] == ["7", "two words"]
    assert same["leads_group"]
    assert same["parent"] == os.getpid()
    assert same["input"] == "a line\n"
    assert sorted(same["descriptors"]) == ["0", "1", "2"]
    assert same["environment"]["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


def test_forked_programs_have_the_standby_s_imports_and_a_chance_of_their_own(
    tmp_path: Path,
) -> None:
    async def run() -> list[dict[str, Any]]:
        async with running(tmp_path, f"--preload={RARE},numpy.random") as (link, _):
            forked = [await facts_of(link, tmp_path) for _ in range(2)]
        return [*forked, await facts_of(NoStandby(), tmp_path)]

    first, second, started = asyncio.run(run())
    assert RARE in first["modules"]
    assert RARE not in started["modules"]
    assert all(one != other for one, other in zip(first["drawn"], second["drawn"], strict=True))


def test_program_that_is_stopped_or_killed_is_known_by_its_end(
    tmp_path: Path, own_children: Callable[[], list[int]]
) -> None:
    async def run() -> None:
        async with running(tmp_path) as (link, _):
            program = await fake(link, tmp_path)
            assert program.is_running
            os.kill(program.pid, signal.SIGSTOP)
            os.kill(program.pid, signal.SIGKILL)
            assert await program.ended() == -signal.SIGKILL
            assert not program.is_running
            await program.kill()
            program.close()
            assert own_children() == [link.pid]

    asyncio.run(run())


def test_program_that_cannot_be_imported_says_so_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "program.log"

    async def run() -> None:
        async with running(tmp_path) as (link, _):
            program = await start_program(link, "no.such.module", (), log)
            assert await program.ended() == 1
            await program.kill()
            program.close()

    asyncio.run(run())
    assert "No module named 'no" in log.read_text()


def test_many_programs_leave_nothing_in_the_standby_or_here(
    tmp_path: Path, own_children: Callable[[], list[int]]
) -> None:
    async def run() -> None:
        async with running(tmp_path) as (link, _):
            await facts_of(link, tmp_path)
            folders = [Path(f"/proc/{pid}/fd") for pid in (link.pid, os.getpid())]
            before = [len(list(folder.iterdir())) for folder in folders]
            for _ in range(10):
                await facts_of(link, tmp_path)
            after = [len(list(folder.iterdir())) for folder in folders]
            # What earlier tests left here may be collected meanwhile.
            assert all(now <= then for now, then in zip(after, before, strict=True)), (
                before,
                after,
            )
            assert own_children() == [link.pid]
            assert process_state(link.pid or 0) == "S"

    asyncio.run(run())


def test_where_no_program_can_be_forked_it_starts_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby_link, "FORK_TIMEOUT_S", 0.5)
    monkeypatch.setattr(standby_link, "_RESTART_DELAYS_S", (0.0, 0.01, 0.01, 0.01))

    async def stopped(link: StandbyLink) -> None:
        assert link.pid is not None
        os.kill(link.pid, signal.SIGSTOP)

    async def ready(link: StandbyLink) -> None:
        return

    async def failing(link: StandbyLink) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not link.num_restarts:
                await asyncio.sleep(0.001)

    async def run() -> None:
        for arguments, prepare, is_ready in (
            # It refuses, with two threads.
            ("--entry=tests.agent.threaded_entry:run", ready, True),
            ("--preload=", stopped, True),
            ("--preload=no_such_library", failing, False),
        ):
            async with running(tmp_path, arguments) as (link, _):
                if is_ready:
                    await link.wait_ready(DEADLINE_S)
                await prepare(link)
                found = await facts_of(link, tmp_path)
                command = found["same"]["file"]
                assert command == "program_facts.py"
                assert "trainer.worker.standby" not in found["modules"]

    asyncio.run(run())


def test_program_that_nobody_waits_for_any_more_is_not_left_behind(
    tmp_path: Path, own_children: Callable[[], list[int]]
) -> None:
    async def run() -> None:
        async with running(tmp_path) as (link, _):
            await link.wait_ready(DEADLINE_S)
            standby = link.pid
            assert standby is not None
            asked = asyncio.Event()

            class Asked:
                async def run(self, program: Program) -> int:
                    asked.set()
                    return await link.run(program)

            os.kill(standby, signal.SIGSTOP)
            given_up = asyncio.create_task(fake(Asked(), tmp_path))
            await asked.wait()
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            os.kill(standby, signal.SIGCONT)
            # Answered after the one before.
            await facts_of(link, tmp_path)
            await only_child(standby, own_children)

    asyncio.run(run())


def test_program_given_up_in_the_moment_of_its_start_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_children: Callable[[], list[int]]
) -> None:
    async def run() -> None:
        async with running(tmp_path) as (link, _):
            await link.wait_ready(DEADLINE_S)
            given_up = asyncio.create_task(fake(link, tmp_path))
            hear, started = link._hear, []

            def hear_and_give_up(event: dict[str, object]) -> bool:
                is_ready = hear(event)
                started.append(event["event"])
                given_up.cancel()
                return is_ready

            monkeypatch.setattr(link, "_hear", hear_and_give_up)
            with pytest.raises(asyncio.CancelledError):
                await given_up
            assert started == ["started"]
            await only_child(link.pid, own_children)

    asyncio.run(run())


def test_standby_that_dies_while_it_is_asked_leaves_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_children: Callable[[], list[int]]
) -> None:
    async def run() -> None:
        async with running(tmp_path) as (link, _):
            await link.wait_ready(DEADLINE_S)
            standby = link.pid
            assert standby is not None
            os.kill(standby, signal.SIGSTOP)
            program = Program(
                module=FAKE, arguments=(), environment=dict(os.environ), streams=(0, 1, 2)
            )
            asking = asyncio.create_task(link.run(program))
            await asyncio.sleep(0)
            os.kill(standby, signal.SIGKILL)
            with pytest.raises(StandbyError, match="died"):
                await asking
            await wait_gone(standby)

    asyncio.run(run())
    assert own_children() == []


def order_suite(controller: FakeController, suite: str) -> int:
    """Have the agent's checks begin; the pid of the runner, from its first finding."""
    wait_for(lambda: controller.hellos, "a hello")
    order_id = f"r/{suite}"
    asked = agents_pb2.CheckOrder(order_id=order_id, suite=suite, timeout_s=3600.0)
    asked.on_this_node.SetInParent()
    controller.send(agents_pb2.ControllerMessage(check_order=asked))

    def detail() -> str:
        reports = [m.check_report for _, m in controller.received if m.HasField("check_report")]
        found = (f for report in reports if report.order_id == order_id for f in report.findings)
        return next((finding.detail for finding in found), "")

    return int(wait_for(detail, "a finding").removeprefix("pid "))


def test_agent_forks_its_checks_beside_workers_and_they_die_with_it(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    runner = order_suite(controller, "stands")
    assert b"trainer.worker.standby" in Path(f"/proc/{runner}/cmdline").read_bytes()
    standby = agent.standby_pid()
    # It could not see to the end of the runner.
    os.kill(standby, signal.SIGSTOP)
    agent.process.kill()
    agent.process.wait()
    wait_for(lambda: runner not in agent.pids(), "the end of the runner")
    os.kill(standby, signal.SIGCONT)
    wait_for(lambda: not agent.pids(), "the end of all others")


def test_checks_of_an_agent_outlive_its_standby(
    controller: FakeController, agent: AgentProcess
) -> None:
    start_job(controller)
    runner = order_suite(controller, "stands")
    first = agent.standby_pid()
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: first not in agent.pids(), "the end of the standby process")
    # From the next one: the agent has looked for what the dead one left.
    start_job(controller, 2)
    assert runner in agent.pids()
    agent.process.terminate()
    agent.process.wait()
    assert not agent.pids()


def test_standby_without_a_descriptor_left_starts_no_program_and_lives_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, f"--preload={RARE}") as (link, _):
            await link.wait_ready(DEADLINE_S)
            standby_pid = link.pid
            assert standby_pid is not None
            _, most = resource.prlimit(standby_pid, resource.RLIMIT_NOFILE)
            # It has as many open: none that is sent with a request arrives.
            resource.prlimit(standby_pid, resource.RLIMIT_NOFILE, (4, most))
            assert RARE not in (await facts_of(link, tmp_path))["modules"]
            resource.prlimit(standby_pid, resource.RLIMIT_NOFILE, (most, most))
            assert RARE in (await facts_of(link, tmp_path))["modules"]
            assert link.pid == standby_pid

    asyncio.run(run())
