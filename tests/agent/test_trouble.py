"""What an agent does when its disk, its checks or its line are in trouble."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from controller.agent import session as sessions
from controller.agent.addresses import Controllers
from controller.agent.checks import CheckOrders
from controller.agent.config import AgentConfig
from controller.agent.core.buffer import EventBuffer, Weight
from controller.agent.core.line import Line
from controller.agent.diagnostics import SuitePlace, Suites
from controller.agent.observe.leftovers import KEPT_LOGS, delete_old_logs
from controller.agent.observe.logs import Logs
from controller.agent.session import Session, SessionEvents
from outlast.v1 import agents_pb2
from tests.agent.harness import (
    AgentProcess,
    FakeController,
    start_command,
    stop_command,
    wait_for,
)
from tests.agent.standbys import NoStandby

DEADLINE_S = 60.0


def config(folder: Path, controller: str = "127.0.0.1:1") -> AgentConfig:
    return AgentConfig(
        node="n0",
        controller=controller,
        state_dir=folder,
        memory_dir=folder / "memory",
        data_dir=folder / "data",
        workers=1,
    )


def test_a_full_disk_refuses_starts_and_ends_neither_agent_nor_stops(
    controller: FakeController, agent: AgentProcess
) -> None:
    wait_for(lambda: controller.hellos, "a hello")
    assert controller.result(controller.command(start_command())).ok
    # Nothing can be written where this folder is.
    (agent.state_dir / "commands.json.tmp").mkdir()
    stopped = controller.result(controller.command(stop_command(1)))
    assert stopped.ok, stopped
    refused = controller.result(controller.command(start_command(2)))
    assert (refused.ok, refused.error_kind) == (False, "resource")
    assert "is its disk full" in refused.detail
    (agent.state_dir / "commands.json.tmp").rmdir()
    assert controller.result(controller.command(start_command(3))).ok
    assert len(controller.hellos) == 1


def test_logs_of_forgotten_jobs_are_kept_within_a_bound(tmp_path: Path) -> None:
    jobs_dir, memory_dir = tmp_path / "jobs", tmp_path / "memory"
    delete_old_logs(jobs_dir, memory_dir)
    for number in range(KEPT_LOGS + 3):
        folder = jobs_dir / f"job{number}" / "a1"
        folder.mkdir(parents=True)
        (folder / "rank-00000.log").write_text("text")
        os.utime(folder.parent, (number, number))
    (memory_dir / "job0").mkdir(parents=True)
    delete_old_logs(jobs_dir, memory_dir)
    left = {path.name for path in jobs_dir.iterdir()}
    # The oldest one still has its host memory, so it is in use.
    assert left == {"job0", *(f"job{number}" for number in range(3, KEPT_LOGS + 3))}


def test_checks_that_break_in_any_way_are_answered_to_the_end(tmp_path: Path) -> None:
    reports: list[agents_pb2.CheckReport] = []

    async def send(message: agents_pb2.AgentMessage) -> None:
        reports.append(message.check_report)

    async def run() -> None:
        # Where its log should be there is no folder.
        place = SuitePlace(node="n0", workers=1, state_dir=tmp_path / "none", runner="none")
        checks = CheckOrders(config(tmp_path), Suites(place, NoStandby()), send)
        asked = agents_pb2.CheckOrder(order_id="r/1", suite="preflight", timeout_s=60.0)
        asked.on_this_node.SetInParent()
        checks.take(asked)
        async with asyncio.timeout(DEADLINE_S):
            while not (reports and reports[-1].done):
                await asyncio.sleep(0.001)
        await checks.close()

    asyncio.run(run())
    (finding,) = (finding for report in reports for finding in report.findings)
    assert finding.verdict == "error"
    assert "diagnostics.log" in finding.detail


def test_an_order_that_nobody_waits_for_makes_room_for_the_next(
    controller: FakeController, agent: AgentProcess
) -> None:
    wait_for(lambda: controller.hellos, "a hello")

    def reports(order_id: str) -> list[agents_pb2.CheckReport]:
        found = [m.check_report for _, m in controller.received if m.HasField("check_report")]
        return [report for report in found if report.order_id == order_id]

    for order_id, suite in (("r/1", "hangs"), ("r/2", "preflight")):
        asked = agents_pb2.CheckOrder(order_id=order_id, suite=suite, timeout_s=3600.0)
        asked.on_this_node.SetInParent()
        controller.send(agents_pb2.ControllerMessage(check_order=asked))
    wait_for(lambda: any(report.findings for report in reports("r/1")), "the first is at work")
    stop = agents_pb2.CheckOrder(order_id="r/1")
    stop.stop.SetInParent()
    controller.send(agents_pb2.ControllerMessage(check_order=stop))
    wait_for(lambda: any(report.done for report in reports("r/2")), "the second is done")
    assert not any(report.done for report in reports("r/1"))


def test_checks_leave_no_dead_process_to_the_agent(tmp_path: Path) -> None:
    """The runner's orphans come to the agent, which inherits whatever is below it."""
    script = f"""
import asyncio, pathlib
from controller.agent import diagnostics
from controller.agent.diagnostics import SuiteError, SuitePlace, Suites
from controller.agent.workers.processes import become_subreaper, child_pids
from diagnostics.core.orders import Order, OrderKind
from tests.agent.standbys import NoStandby

diagnostics.KILL_AFTER_S = 0.5
become_subreaper()

async def run():
    place = SuitePlace(
        node="n0", workers=1, state_dir=pathlib.Path({str(tmp_path)!r}),
        runner="tests.agent.fake_runner",
    )
    order = Order(kind=OrderKind.SUITE, suite="hangs", deadline_s=5.0)
    try:
        await Suites(place, NoStandby()).run(order)
    except SuiteError as error:
        print("1 findings" in str(error), child_pids())

asyncio.run(run())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "True []", done.stderr


def log_query(query_id: str, *, follow: bool, job_id: str = "job") -> agents_pb2.LogQuery:
    return agents_pb2.LogQuery(query_id=query_id, job_id=job_id, follow=follow)


def test_every_log_query_is_told_its_end(tmp_path: Path) -> None:
    ended: list[str] = []

    async def send(message: agents_pb2.AgentMessage) -> None:
        if message.log_chunk.end:
            ended.append(message.log_chunk.query_id)

    async def run() -> None:
        logs = Logs(tmp_path, send, max_queries=1)
        logs.query(log_query("crowded out", follow=True))
        logs.query(log_query("newest", follow=True))
        async with asyncio.timeout(DEADLINE_S):
            while "crowded out" not in ended:
                await asyncio.sleep(0.001)
            (tmp_path / "broken").mkdir()
            (tmp_path / "broken" / "a1").write_text("no folder")
            logs.query(log_query("broken", follow=False, job_id="broken"))
            while "broken" not in ended:
                await asyncio.sleep(0.001)
        logs.cancel_all()

    asyncio.run(run())


def test_events_and_heartbeats_do_not_wait_for_logs(
    controller: FakeController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers of logs refill the outbox as fast as it empties."""
    monkeypatch.setattr(sessions, "MAX_OUTBOX", 2)
    line: Line[agents_pb2.AgentEvent] = Line(EventBuffer(10), now_s=0.0)

    async def run() -> None:
        lost = asyncio.Event()
        own = config(tmp_path, f"127.0.0.1:{controller.start()}")
        session = Session(
            own,
            Controllers(own),
            line,
            SessionEvents(
                hello=lambda: agents_pb2.Hello(node_id="n0", workers=1),
                heartbeat=agents_pb2.Heartbeat,
                received=lambda _: None,
                welcomed=lambda _: line.welcomed(),
                lost=lost.set,
                acknowledged=line.acknowledged,
            ),
            Random(0),
        )

        async def read_logs() -> None:
            chunk = agents_pb2.LogChunk(query_id="q", data=b"x" * 1024)
            while True:
                await session.send(agents_pb2.AgentMessage(log_chunk=chunk))

        tasks = [asyncio.create_task(session.run())]
        async with asyncio.timeout(DEADLINE_S):
            while not session.is_connected:
                await asyncio.sleep(0.001)
            tasks += [asyncio.create_task(read_logs()) for _ in range(4)]
            while not any(m.HasField("log_chunk") for _, m in controller.received):
                await asyncio.sleep(0.001)
            seq = line.add(agents_pb2.AgentEvent(seq=1), Weight.LASTING)
            assert seq == 1
            session.wake()
            # Acknowledged, so it was sent.
            while len(line.buffer):
                await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
