"""Processes by session, and ending all of a session at once.

A local node is one session: its agent leads it, and the standby process, the
workers and the checks inherit it. Killing every process of a session is what
the loss of a machine looks like from outside.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from controller.local.processes import members_of, session_of

KILL_TIMEOUT_S = 10.0
_POLL_S = 0.02

__all__ = ["command_line", "kill", "kill_sessions", "session_of"]


def command_line(pid: int) -> list[str]:
    """The arguments that a process was started with; empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return raw.decode(errors="replace").split("\0")[:-1]


def kill_sessions(sessions: Iterable[int], *, timeout_s: float = KILL_TIMEOUT_S) -> list[int]:
    """SIGKILL everything in these sessions until nothing is left; returns whom it hit.

    The leader goes first: an agent must not live to see its workers die.

    Raises:
        TimeoutError: something would not die.
    """
    wanted = list(sessions)
    hit: dict[int, None] = {}
    deadline_s = time.monotonic() + timeout_s
    # More than one round: a process may fork between the look and the signal.
    while left := members_of(wanted):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"processes {left} are still there {timeout_s:.0f} s after SIGKILL")
        for pid in sorted(left, key=lambda pid: pid not in wanted):
            if kill(pid):
                hit[pid] = None
        time.sleep(_POLL_S)
    return list(hit)


def kill(pid: int) -> bool:
    """SIGKILL one process; whether there was one."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
