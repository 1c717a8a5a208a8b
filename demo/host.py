"""A controller with local nodes in processes of its own, and faults that hit them from outside.

The controller is `outlast up`, as a user would start it. The demo looks at what
lies in its state folder and at /proc; it never asks the controller to break
anything, and never tells it that something broke.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from demo.processes import command_line, kill, kill_sessions, session_of
from outlast.blackbox import Present, Reader
from outlast.cli.errors import CliError, ExitCode
from outlast.startup import python_command
from outlast.worker_contract import WorkerFiles

START_TIMEOUT_S = 60.0
# `outlast up` stops its nodes itself; whatever is left after this is killed.
STOP_TIMEOUT_S = 15.0
_POLL_S = 0.05
_LOG_TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcesses:
    """A local node: its session, and its host-memory folder."""

    node: str
    session: int
    memory_dir: Path


class Host:
    """One `outlast up`, from start to the last of its processes."""

    def __init__(self, state_dir: Path, *, nodes: int, workers_per_node: int, standby: int) -> None:
        self.state_dir = state_dir
        self._arguments = [
            *("--nodes", str(nodes)),
            *("--workers-per-node", str(workers_per_node)),
            *("--standby", str(standby)),
            *("--state-dir", str(state_dir)),
            *("--grpc", "127.0.0.1:0"),
            *("--http", "127.0.0.1:0"),
            "--fresh",
        ]
        self._log = state_dir.with_name(f"{state_dir.name}.log")
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: dict[int, None] = {}
        self._memory_dirs: dict[Path, None] = {}

    def start(self) -> str:
        """Start everything; the controller's address.

        Raises:
            CliError: it did not come up; the message has the end of its log.
        """
        self.state_dir.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            # Its own session: Ctrl-C in the terminal reaches the demo alone, which
            # then stops things in order.
            self._process = subprocess.Popen(
                [*python_command("outlast.cli.main"), "up", *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._sessions[self._process.pid] = None
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                raise CliError(
                    f"the controller ended with code {self._process.returncode}:\n"
                    f"{self._log_tail()}",
                    ExitCode.JOB_FAILED,
                )
            address = self._address()
            if address:
                return address
            time.sleep(_POLL_S)
        raise CliError(
            f"the controller was not up after {START_TIMEOUT_S:.0f} s:\n{self._log_tail()}",
            ExitCode.JOB_FAILED,
        )

    def node(self, node: str) -> NodeProcesses | None:
        """The processes of a node; None when its agent does not run."""
        found = self._read(self.state_dir / "nodes" / node / "agent.json")
        pid = int(found.get("pid", 0))
        session = session_of(pid) if pid else None
        arguments = command_line(pid)
        # The pid may have passed on to a stranger.
        if session is None or str(self.state_dir) not in " ".join(arguments):
            return None
        memory_dir = Path(arguments[arguments.index("--memory-dir") + 1])
        assert session not in (os.getsid(0), self._own_session()), (
            f"{node} shares its session with the controller or with us"
        )
        self._sessions[session] = None
        self._memory_dirs[memory_dir] = None
        return NodeProcesses(node=node, session=session, memory_dir=memory_dir)

    def note_nodes(self) -> None:
        """Remember the sessions of every node, so that none can be left behind."""
        folder = self.state_dir / "nodes"
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            self.node(entry.name)

    def present(self, node: str, job_id: str, attempt: int, rank: int) -> Present | None:
        """What a rank's black box says; None while it has none or its process is gone."""
        folder = self.state_dir / "nodes" / node / "jobs" / job_id / f"a{attempt}"
        try:
            reader = Reader(WorkerFiles.below(folder, rank).blackbox)
        except (FileNotFoundError, ValueError):
            return None
        try:
            present = reader.present()
        finally:
            reader.close()
        place = self.node(node)
        alive = place is not None and session_of(present.pid) == place.session
        return present if alive and present.attempt == attempt else None

    def kill_worker(self, present: Present) -> float | None:
        """SIGKILL the process behind a black box; when, or None if it was gone."""
        at_s = time.time()
        return at_s if kill(present.pid) else None

    def lose_node(self, node: NodeProcesses) -> tuple[float, list[int]]:
        """Kill every process of a node and wipe its host memory; when, and whom."""
        at_s = time.time()
        pids = kill_sessions([node.session])
        shutil.rmtree(node.memory_dir, ignore_errors=True)
        return at_s, pids

    def stop(self) -> None:
        """End everything that was started here, whatever state it is in."""
        process = self._process
        if process is None:
            return
        self.note_nodes()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self.note_nodes()
        kill_sessions(self._sessions)
        process.wait()
        for memory_dir in self._memory_dirs:
            shutil.rmtree(memory_dir.parent, ignore_errors=True)
        self._process = None

    def _own_session(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _address(self) -> str:
        found = self._read(self.state_dir / "controller.json")
        return str(found["grpc"]) if found.get("pid") == self._own_session() else ""

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:])

    @staticmethod
    def _read(path: Path) -> dict[str, str | int]:
        try:
            document = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}
