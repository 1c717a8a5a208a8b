"""Runs suites of checks on this node, as child processes.

`python -m diagnostics.runner` imports torch and may hang or crash on a bad
device; the agent must not. It reads one finding per line and kills what does
not end in time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from controller.agent.processes import wait_gone
from outlast.errors import RetryableError
from outlast.v1 import diagnostics_pb2

logger = logging.getLogger(__name__)

# The runner keeps its own deadline and says which checks it did not reach; it is killed
# only when it fails at that.
KILL_AFTER_S = 5.0
_MAX_LINE_BYTES = 2**20
_MAX_FINDINGS = 10_000

OnFinding = Callable[[diagnostics_pb2.Finding], Awaitable[None]]


class SuiteError(RetryableError):
    """The suite itself did not run, which says nothing about the node's health."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlace:
    """What the runner must know of this node."""

    node: str
    workers: int
    state_dir: Path
    runner: str
    """Module that runs the checks."""


class Suites:
    """One suite at a time: two would measure each other."""

    def __init__(self, place: SuitePlace) -> None:
        self._place = place
        self._lock = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Of the runner at work, if any."""
        return None if self._process is None else self._process.pid

    async def run(
        self, suite: str, timeout_s: float, on_finding: OnFinding | None = None
    ) -> list[diagnostics_pb2.Finding]:
        """Every finding of the suite; each is handed to `on_finding` as it comes.

        Raises:
            SuiteError: the runner could not run it, or had to be killed.
        """
        async with self._lock:
            log_path = self._place.state_dir / "diagnostics.log"
            process = self._process = self._spawn(suite, timeout_s, log_path)
            findings: list[diagnostics_pb2.Finding] = []
            try:
                async with asyncio.timeout(timeout_s + KILL_AFTER_S):
                    await self._collect(process, findings, on_finding)
            except TimeoutError as error:
                raise SuiteError(
                    f"suite {suite}: did not end within {timeout_s:.0f} s, "
                    f"{len(findings)} findings so far; see {log_path}"
                ) from error
            finally:
                await _end(process)
                self._process = None
            if process.returncode != 0:
                raise SuiteError(
                    f"suite {suite}: the runner ended with code {process.returncode}; "
                    f"see {log_path}"
                )
            return findings

    def _spawn(self, suite: str, timeout_s: float, log_path: Path) -> subprocess.Popen[bytes]:
        place = self._place
        command = [
            *(sys.executable, "-m", place.runner),
            *("--suite", suite),
            *("--node", place.node),
            *("--workers", str(place.workers)),
            *("--baseline-file", str(place.state_dir / "baseline.json")),
            *("--deadline-s", f"{timeout_s:g}"),
        ]
        with log_path.open("ab") as log:
            # A group of its own: its children go with it.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )

    async def _collect(
        self,
        process: subprocess.Popen[bytes],
        findings: list[diagnostics_pb2.Finding],
        on_finding: OnFinding | None,
    ) -> None:
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        try:
            while (line := await reader.readline()) and len(findings) < _MAX_FINDINGS:
                finding = _parse(line)
                findings.append(finding)
                if on_finding is not None:
                    await on_finding(finding)
        finally:
            transport.close()
        await wait_gone(process.pid)


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the runner's whole group, unless it has ended by itself."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        await wait_gone(process.pid)
        process.wait()
        logger.warning("diagnostics killed: pid=%d", process.pid)
    assert process.stdout is not None
    process.stdout.close()


def _parse(line: bytes) -> diagnostics_pb2.Finding:
    try:
        document = json.loads(line)
        return json_format.ParseDict(
            document, diagnostics_pb2.Finding(), ignore_unknown_fields=True
        )
    except (ValueError, json_format.ParseError) as error:
        raise SuiteError(f"the runner printed {line[:200]!r}, which is no finding") from error
