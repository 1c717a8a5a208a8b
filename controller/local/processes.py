"""Sessions of processes on this machine: who belongs to a local node, and its end.

A node's agent leads a session (`setsid`); its standby process and workers stay
in it, whatever groups they make. So the session id, which is the agent's pid,
names everything that runs on the node.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from controller.agent.workers.processes import process_name, wait_gone

# Fields of /proc/<pid>/stat after the command: state, parent, group, session.
_STATE, _SESSION = 0, 3


def members_of(sessions: list[int]) -> list[int]:
    """Pids of every process that lives in one of these sessions."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        fields = _stat(int(entry.name))
        if fields is not None and fields[_STATE] not in "ZX" and int(fields[_SESSION]) in sessions:
            found.append(int(entry.name))
    return found


def marked_with(variable: str, value: str) -> list[int]:
    """Pids of our live processes that have this in their environment, by age."""
    wanted = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        # Gone meanwhile, or somebody else's.
        except OSError:
            continue
        pid = int(entry.name)
        name = process_name(pid)
        if wanted in environment and name is not None:
            found.append((name.start_ticks, pid))
    return [pid for _, pid in sorted(found)]


def session_of(pid: int) -> int | None:
    """The session that a process lives in; None when it is gone."""
    fields = _stat(pid)
    return None if fields is None or fields[_STATE] in "ZX" else int(fields[_SESSION])


async def kill_sessions(sessions: list[int], *, timeout_s: float) -> list[int]:
    """SIGKILL everything in these sessions; pids that are still there after the time."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        # Again and again: a process may have forked between the look and the kill.
        pids = members_of(sessions)
        left_s = deadline_s - loop.time()
        if not pids or left_s <= 0:
            return pids
        for pid in pids:
            _kill(pid, signal.SIGKILL)
        await wait_all_gone(pids, timeout_s=min(left_s, 1.0))


async def wait_all_gone(pids: list[int], *, timeout_s: float) -> None:
    """Return when all of these have ended, or the time is up."""
    waits = [asyncio.ensure_future(wait_gone(pid)) for pid in pids]
    if not waits:
        return
    _, pending = await asyncio.wait(waits, timeout=timeout_s)
    for wait in pending:
        wait.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def terminate(pid: int) -> None:
    """Ask a process to end."""
    _kill(pid, signal.SIGTERM)


def kill(pid: int) -> None:
    """End a process."""
    _kill(pid, signal.SIGKILL)


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _stat(pid: int) -> list[str] | None:
    try:
        # A process may call itself anything; the kernel cuts its name after 15 bytes.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
