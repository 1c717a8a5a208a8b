"""Nodes that join by hand, as `outlast agent` makes them: tests kill and restart their agents."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.local.processes import members_of
from tests.controller.processes import Controller
from tests.e2e.cluster import DEADLINE_S

# The agent's usual checks before a job takes its nodes cost seconds: two nodes import torch.
REAL_CHECKS = "diagnostics.runner"
QUICK_CHECKS = "tests.chaos.quick_checks"
# Options of a controller whose local nodes have these.
QUICKLY_CHECKED = (
    "--agent-command",
    shlex.join([sys.executable, "-m", "controller.agent", "--suite-runner", QUICK_CHECKS]),
)


class HandNodes:
    """Agents of this machine, each with the folders of a node of its own."""

    def __init__(self, process: Controller, folder: Path, checks: str) -> None:
        self._process = process
        self._folder = folder
        self._checks = checks
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def folder(self, node: str) -> Path:
        """What a node has: its state, and its host memory."""
        return self._folder / node

    def start(self, node: str) -> None:
        """Start the agent of a node, or start it again."""
        own = self.folder(node)
        own.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "controller.agent", "--node", node, "--workers", "1"]
        command += ["--controller", self._process.grpc]
        command += ["--controller-file", str(self._process.state_dir / "controller.json")]
        command += ["--state-dir", str(own / "state"), "--memory-dir", str(own / "memory")]
        command += ["--data-dir", str(self._folder / "data"), *self._process.join_arguments]
        command += ["--suite-runner", self._checks]
        with (own / "agent.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, node: str) -> None:
        """SIGKILL an agent."""
        self.agents[node].kill()
        self.agents[node].wait(DEADLINE_S)

    def stop(self, node: str, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask an agent to end; its exit code."""
        self.agents[node].send_signal(number)
        return self.agents[node].wait(DEADLINE_S)

    def end(self) -> None:
        for agent in self.agents.values():
            agent.terminate()
        for agent in self.agents.values():
            agent.wait(DEADLINE_S)
        assert not members_of([agent.pid for agent in self.agents.values()])


@contextmanager
def hand_nodes(
    process: Controller, folder: Path, *names: str, checks: str = REAL_CHECKS
) -> Iterator[HandNodes]:
    """Nodes of these names; none of their processes is left after the block."""
    nodes = HandNodes(process, folder, checks)
    try:
        for name in names:
            nodes.start(name)
        yield nodes
    finally:
        nodes.end()
