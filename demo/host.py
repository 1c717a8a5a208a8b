"""A controller with local nodes in processes of its own, and faults that hit them from outside.

The controller is `outlast up`, as a user would start it. The demo looks at what
lies in its state folder and at /proc; it never asks the controller to break
anything, and never tells it that something broke.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from demo.processes import command_line, kill, kill_sessions, session_of
from outlast.blackbox import Present, Reader
from outlast.cli.embedded import EmbeddedController
from outlast.worker_contract import WorkerFiles


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
        self._controller = EmbeddedController(
            state_dir, nodes=nodes, workers_per_node=workers_per_node, standby=standby
        )
        self._sessions: dict[int, None] = {}

    def start(self) -> str:
        """Start everything; the controller's address.

        Raises:
            CliError: it did not come up; the message has the end of its log.
        """
        self._controller.start()
        self._sessions[self._controller.pid] = None
        return self._controller.wait_address()

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
        assert session not in (os.getsid(0), self._controller.pid), (
            f"{node} shares its session with the controller or with us"
        )
        self._sessions[session] = None
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
        self.note_nodes()
        self._controller.stop()
        kill_sessions(self._sessions)

    @staticmethod
    def _read(path: Path) -> dict[str, str | int]:
        try:
            document = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}
