"""Suites of checks as child processes that may hang, crash or talk nonsense."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from controller.agent import diagnostics
from controller.agent.diagnostics import SuiteError, SuitePlace, Suites
from outlast.v1 import diagnostics_pb2
from tests.agent.harness import session_pids


def make(folder: Path) -> Suites:
    place = SuitePlace(node="n0", workers=2, state_dir=folder, runner="tests.agent.fake_runner")
    return Suites(place)


def test_findings_come_one_by_one_and_together(tmp_path: Path) -> None:
    seen: list[str] = []

    async def run() -> list[diagnostics_pb2.Finding]:
        async def on_finding(finding: diagnostics_pb2.Finding) -> None:
            seen.append(finding.verdict)

        return await make(tmp_path).run("preflight", 30.0, on_finding)

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
        asyncio.run(suites.run(suite, 0.5))
    assert suites.pid is None
    left = [pid for pid in session_pids(os.getsid(0)) if _is_runner(pid)]
    assert left == []


def test_cancelled_suite_is_killed(tmp_path: Path) -> None:
    suites = make(tmp_path)

    async def run() -> int:
        started = asyncio.Event()

        async def on_finding(finding: diagnostics_pb2.Finding) -> None:
            started.set()

        task = asyncio.create_task(suites.run("hangs", 60.0, on_finding))
        await started.wait()
        pid = suites.pid
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert pid is not None
        return pid

    pid = asyncio.run(run())
    assert not Path(f"/proc/{pid}").exists()


def _is_runner(pid: int) -> bool:
    try:
        return b"tests.agent.fake_runner" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
