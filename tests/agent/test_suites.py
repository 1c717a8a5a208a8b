"""Suites of checks as child processes that may hang, crash or talk nonsense."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from controller.agent import diagnostics
from controller.agent.diagnostics import SuiteError, SuitePlace, Suites
from controller.agent.workers.forked_program import Program
from controller.agent.workers.processes import child_pids, wait_gone
from controller.agent.workers.programs import Standby
from controller.agent.workers.standby_events import StandbyError
from diagnostics.core.orders import Order, OrderKind
from outlast.v1 import diagnostics_pb2
from tests.agent.standbys import NoStandby, inheriting, running

FAKE = "tests.agent.fake_runner"


@pytest.fixture(params=["forked", "started"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How the runner comes to be: from a standby process, or by itself."""
    with inheriting():
        yield str(request.param)


@asynccontextmanager
async def suites_of(folder: Path, way: str, runner: str = FAKE) -> AsyncIterator[Suites]:
    """Suites on a node where the runner starts in this way."""
    place = SuitePlace(node="n0", workers=2, state_dir=folder, runner=runner)
    async with AsyncExitStack() as opened:
        standby: Standby = NoStandby()
        if way == "forked":
            standby, _ = await opened.enter_async_context(running(folder))
        suites = Suites(place, standby)
        try:
            yield suites
        finally:
            await suites.close()


def order(suite: str, deadline_s: float = 30.0, **changes: object) -> Order:
    """A suite on this node, unless told otherwise."""
    plain = Order(kind=OrderKind.SUITE, suite=suite, deadline_s=deadline_s)
    return replace(plain, **changes)  # type: ignore[arg-type]  # field values of any type


def test_findings_come_one_by_one_and_together(tmp_path: Path, way: str) -> None:
    seen: list[str] = []

    async def run() -> list[diagnostics_pb2.Finding]:
        async def on_finding(finding: diagnostics_pb2.Finding) -> None:
            seen.append(finding.verdict)

        async with suites_of(tmp_path, way) as suites:
            return await suites.run(order("preflight"), on_finding)

    findings = asyncio.run(run())
    assert seen == ["pass", "fail"]
    assert [finding.verdict for finding in findings] == seen
    assert findings[0].node == "n0"
    assert findings[0].value == 1.5
    assert not findings[0].HasField("threshold")
    assert findings[1].threshold == 1.0


@pytest.mark.parametrize(
    ("suite", "words"), [("crashes", "code -6"), ("rambles", "it is fine"), ("hangs", "1 findings")]
)
def test_runner_that_fails_says_nothing_about_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, suite: str, words: str
) -> None:
    async def run() -> None:
        async with suites_of(tmp_path, way) as suites:
            # A runner that has started: how long that takes is no matter here.
            await suites.run(order("preflight"))
            runner = suites.pid
            others = set(child_pids()) - {runner}
            monkeypatch.setattr(diagnostics, "KILL_AFTER_S", 0.5)
            with pytest.raises(SuiteError, match=words):
                await suites.run(order(suite, 1.0))
            assert suites.pid is None
            assert set(child_pids()) == others

    asyncio.run(run())


def test_a_runner_is_known_before_anything_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    seen: list[int | None] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        async with suites_of(tmp_path, way) as suites:

            async def connect(*_: object) -> None:
                seen.append(suites.pid)
                raise OSError("no pipe")

            monkeypatch.setattr(loop, "connect_read_pipe", connect)
            with pytest.raises(OSError, match="no pipe"):
                await suites.run(order("preflight"))
            assert suites.pid is None

    asyncio.run(run())
    assert len(seen) == 1
    assert seen[0] is not None


def test_cancelled_suite_is_killed(tmp_path: Path, way: str) -> None:
    async def run() -> int:
        started = asyncio.Event()

        async def on_finding(finding: diagnostics_pb2.Finding) -> None:
            started.set()

        async with suites_of(tmp_path, way) as suites:
            task = asyncio.create_task(suites.run(order("hangs", 60.0), on_finding))
            await started.wait()
            pid = suites.pid
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert pid is not None
            return pid

    pid = asyncio.run(run())
    assert not Path(f"/proc/{pid}").exists()


def test_a_runner_is_kept_for_the_next_order_and_then_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Importing torch takes seconds, and a run of diagnostics has an order each second."""

    async def run() -> None:
        async with suites_of(tmp_path, way) as suites:
            first = await suites.run(order("preflight"))
            monkeypatch.setattr(diagnostics, "IDLE_S", 0.05)
            second = await suites.run(order("preflight"))
            assert first[0].detail == second[0].detail
            async with asyncio.timeout(30.0):
                while suites.pid is not None:
                    await asyncio.sleep(0.01)
            third = await suites.run(order("preflight"))
            assert third[0].detail != first[0].detail
            await suites.close()
            assert suites.pid is None

    asyncio.run(run())


def test_the_runner_is_told_how_to_try_stores_that_are_no_folders(tmp_path: Path) -> None:
    given: list[str] = []

    class Refusing(NoStandby):
        async def run(self, program: Program) -> int:
            given.extend(program.arguments)
            raise StandbyError("not here")

    async def run() -> None:
        place = SuitePlace(node="n0", workers=2, state_dir=tmp_path, runner=FAKE)
        suites = Suites(place, Refusing())
        await suites.run(order("preflight"))
        arguments = Path(f"/proc/{suites.pid}/cmdline").read_bytes().decode().split("\0")
        await suites.close()
        # The same, forked or started.
        assert arguments[-len(given) - 1 : -1] == given

    asyncio.run(run())
    assert given[given.index("--storage-probe") + 1] == "checkpoint.storage.probe"


def test_a_runner_that_died_while_it_was_idle_is_replaced(tmp_path: Path, way: str) -> None:
    async def run() -> None:
        async with suites_of(tmp_path, way) as suites:
            await suites.run(order("preflight"))
            assert suites.pid is not None
            os.kill(suites.pid, signal.SIGKILL)
            await wait_gone(suites.pid)
            assert len(await suites.run(order("preflight"))) == 2

    asyncio.run(run())


def test_a_runner_outlives_the_standby_from_which_it_was_forked(tmp_path: Path) -> None:
    async def run() -> None:
        place = SuitePlace(node="n0", workers=2, state_dir=tmp_path, runner=FAKE)
        async with running(tmp_path) as (link, _):
            suites = Suites(place, link)
            lost = asyncio.Event()

            async def on_finding(finding: diagnostics_pb2.Finding) -> None:
                if not lost.is_set():
                    assert link.pid is not None
                    os.kill(link.pid, signal.SIGKILL)
                    lost.set()
                    await wait_gone(link.pid)

            first = await suites.run(order("preflight"), on_finding)
            assert lost.is_set()
            second = await suites.run(order("preflight"))
            assert [finding.detail for finding in first] == [finding.detail for finding in second]
            await suites.close()

    with inheriting():
        asyncio.run(run())


def test_a_host_says_where_it_listens_before_anything_is_found(tmp_path: Path, way: str) -> None:
    heard: list[object] = []

    async def run() -> None:
        async def begun() -> None:
            heard.append("begun")

        async def listening(port: int) -> None:
            heard.append(port)

        async def finding(found: diagnostics_pb2.Finding) -> None:
            heard.append(found.peer)

        async with suites_of(tmp_path, way) as suites:
            hosting = order("preflight", kind=OrderKind.HOST, peer="n1")
            await suites.run(hosting, finding, listening, begun)

    asyncio.run(run())
    assert heard == ["begun", 4242, "n1", "n1"]
