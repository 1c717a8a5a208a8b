"""A local node that is lost as a machine is: its processes and its memory at once."""

from __future__ import annotations

import shutil
from pathlib import Path

from controller.local.processes import kill, members_of
from tests.controller.processes import node_pids


def lose_node(state_dir: Path, node: str) -> None:
    """Kill everything on a node, then take its host memory."""
    memory = memory_folder(state_dir) / node
    for pid in members_of([node_pids(state_dir)[node]]):
        kill(pid)
    shutil.rmtree(memory, ignore_errors=True)


def memory_folder(state_dir: Path) -> Path:
    (folder,) = {
        Path(line.split("--memory-dir ")[1].split()[0]).parent
        for line in command_lines()
        if f"--state-dir {state_dir.resolve()}/nodes" in line and "--memory-dir " in line
    }
    return folder


def command_lines() -> list[str]:
    lines = []
    for entry in Path("/proc").iterdir():
        try:
            lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return lines
