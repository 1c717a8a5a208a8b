"""A controller with local nodes that another command starts for itself, and its end.

It is `outlast up` in a process and a folder of its own. It ends with the command that started it,
however that ends: its standard input is a pipe from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from outlast import private
from outlast.cli.errors import CliError, ExitCode
from outlast.startup import python_command

START_TIMEOUT_S = 60.0
# `outlast up` stops its nodes itself; whatever is left after this is killed.
STOP_TIMEOUT_S = 15.0
_POLL_S = 0.02
_LOG_TAIL_LINES = 15


class StartCancelledError(Exception):
    """The start was cancelled before the controller listened."""


class EmbeddedController:
    """One `outlast up`, from start to the last of its processes."""

    def __init__(
        self, state_dir: Path, *, nodes: int, workers_per_node: int, standby: int = 0
    ) -> None:
        self.state_dir = state_dir
        self.log = state_dir.with_name(f"{state_dir.name}.log")
        self._arguments = [
            *("--nodes", str(nodes)),
            *("--workers-per-node", str(workers_per_node)),
            *("--standby", str(standby)),
            *("--state-dir", str(state_dir)),
            *("--grpc", "127.0.0.1:0"),
            *("--http", "127.0.0.1:0"),
            "--fresh",
            "--stop-with-stdin",
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the controller; its nodes have sessions of their own."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process; `wait_address` returns when it listens."""
        self.state_dir.parent.mkdir(parents=True, exist_ok=True)
        with private.open_to_append(self.log) as log:
            # Its own session: Ctrl-C in the terminal reaches the command alone, which then stops
            # things in order.
            self._process = subprocess.Popen(
                [*python_command("outlast.cli.main"), "up", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_address(self, is_cancelled: Callable[[], bool] = lambda: False) -> str:
        """Wait until it listens; its gRPC address.

        Raises:
            CliError: it did not come up; the message has the end of its log.
            StartCancelledError: `is_cancelled` turned true first.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if is_cancelled():
                raise StartCancelledError
            self.check()
            found = self.listens_at()
            if found:
                return found
            time.sleep(_POLL_S)
        raise CliError(
            f"the controller was not up after {START_TIMEOUT_S:.0f} s:\n{self._log_tail()}",
            ExitCode.JOB_FAILED,
        )

    def check(self) -> None:
        """Check that it still runs.

        Raises:
            CliError: it has ended; the message has the end of its log.
        """
        assert self._process is not None
        if self._process.poll() is not None:
            raise CliError(
                f"the controller ended with code {self._process.returncode}:\n{self._log_tail()}",
                ExitCode.JOB_FAILED,
            )

    def stop(self) -> None:
        """Stop the controller, and kill whatever is left of it and its nodes."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the controller and its nodes at once."""
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        self._end_nodes()

    def listens_at(self) -> str:
        """Its gRPC address; "" before it has one."""
        try:
            noted = json.loads((self.state_dir / "controller.json").read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return ""
        is_ours = isinstance(noted, dict) and noted.get("pid") == self.pid
        return str(noted["grpc"]) if is_ours else ""

    def _end_nodes(self) -> None:
        """A controller that was killed leaves its nodes running."""
        from controller.local.cluster import end_nodes

        asyncio.run(end_nodes(self.state_dir))

    def _log_tail(self) -> str:
        return "\n".join(f"  {line}" for line in _last_lines(self.log, _LOG_TAIL_LINES))


def _last_lines(path: Path, most: int) -> Sequence[str]:
    return path.read_text(errors="replace").splitlines()[-most:]
