"""Suites of checks as child processes that may hang, crash or talk nonsense."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from controller.agent import diagnostics
from controller.agent.diagnostics import SuiteError, SuitePlace, Suites
from controller.agent.workers.processes import wait_gone
from diagnostics.core.orders import Order, OrderKind
from outlast.v1 import diagnostics_pb2
from tests.agent.harness import session_pids


def make(folder: Path) -> Suites:
    place = SuitePlace(node="n0", workers=2, state_dir=folder, runner="tests.agent.fake_runner")
    return Suites(place)


def order(suite: str, deadline_s: float = 30.0, **changes: object) -> Order:
    """A suite on this node, unless told otherwise."""
    plain = Order(kind=OrderKind.SUITE, suite=suite, deadline_s=deadline_s)
    return replace(plain, **changes)  # type: ignore[arg-type]  # field values of any type


def test_findings_come_one_by_one_and_together(tmp_path: Path) -> None:
    seen: list[str] = []

    async def run() -> list[diagnostics_pb2.Finding]:
        async def on_finding(finding: diagnostics_pb2.Finding) -> None:
            seen.append(finding.verdict)

        suites = make(tmp_path)
        found = await suites.run(order("preflight"), on_finding)
        await suites.close()
        return found

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: str, words: str
) -> None:
    monkeypatch.setattr(diagnostics, "KILL_AFTER_S", 0.5)
    suites = make(tmp_path)
    with pytest.raises(SuiteError, match=words):
        asyncio.run(suites.run(order(suite, 1.0)))
    assert suites.pid is None
    left = [pid for pid in session_pids(os.getsid(0)) if _is_runner(pid)]
    assert left == []


def test_a_runner_is_known_before_anything_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []

    async def run() -> None:
        suites, loop = make(tmp_path), asyncio.get_running_loop()

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


def test_cancelled_suite_is_killed(tmp_path: Path) -> None:
    suites = make(tmp_path)

    async def run() -> int:
        started = asyncio.Event()

        async def on_finding(finding: diagnostics_pb2.Finding) -> None:
            started.set()

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing torch takes seconds, and a run of diagnostics has an order each second."""

    async def run() -> None:
        suites = make(tmp_path)
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
    async def run() -> list[bytes]:
        suites = make(tmp_path)
        await suites.run(order("preflight"))
        arguments = Path(f"/proc/{suites.pid}/cmdline").read_bytes().split(b"\0")
        await suites.close()
        return arguments

    arguments = asyncio.run(run())
    assert arguments[arguments.index(b"--storage-probe") + 1] == b"checkpoint.storage.probe"


def test_a_runner_that_died_while_it_was_idle_is_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        suites = make(tmp_path)
        await suites.run(order("preflight"))
        assert suites.pid is not None
        os.kill(suites.pid, signal.SIGKILL)
        await wait_gone(suites.pid)
        assert len(await suites.run(order("preflight"))) == 2
        await suites.close()

    asyncio.run(run())


def test_a_host_says_where_it_listens_before_anything_is_found(tmp_path: Path) -> None:
    heard: list[object] = []

    async def run() -> None:
        async def begun() -> None:
            heard.append("begun")

        async def listening(port: int) -> None:
            heard.append(port)

        async def finding(found: diagnostics_pb2.Finding) -> None:
            heard.append(found.peer)

        suites = make(tmp_path)
        hosting = order("preflight", kind=OrderKind.HOST, peer="n1")
        await suites.run(hosting, finding, listening, begun)
        await suites.close()

    asyncio.run(run())
    assert heard == ["begun", 4242, "n1", "n1"]


def _is_runner(pid: int) -> bool:
    """Whether it is one of this process, or one that nobody looks after any more."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return False
    # Other tests beside this one have runners, too.
    return b"tests.agent.fake_runner" in command and parent in (os.getpid(), 1)
