"""Processes as Linux shows them: who they are, when they end, and how to end them.

Waiting goes through pidfds and the event loop, so that the end of a process is
noticed at once and without polling. A pid alone is never trusted across time:
pids are reused, so a process is named by its pid and its start time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
# A killed process leaves within milliseconds, unless it is stuck in the kernel.
_REAP_PAUSE_S = 0.01
_REAP_TRIES = 200
_ASK_PAUSE_S = 0.05
_STRAY_GRACE_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessName:
    """A process for all time: pid and start time in clock ticks since boot."""

    pid: int
    start_ticks: int


def process_name(pid: int) -> ProcessName | None:
    """The name of a process that runs now; None when there is none."""
    fields = stat_of(pid)
    return None if fields is None else ProcessName(pid=pid, start_ticks=int(fields[19]))


def process_state(pid: int) -> str:
    """State letter of a process, as `ps` shows it; "" when there is none."""
    fields = stat_of(pid)
    return "" if fields is None else fields[0]


def zombie_status(pid: int) -> int | None:
    """The wait status of a dead process that its parent has not reaped; None otherwise."""
    fields = stat_of(pid)
    if fields is None or fields[0] != "Z":
        return None
    return int(fields[49])


def how_ended(code: int) -> str:
    """What ended a process, from the return code that `subprocess` has for it, in words."""
    if code >= 0:
        return f"exit code {code}"
    known = -code in set(signal.Signals)
    return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def reap(pid: int) -> int | None:
    """The wait status of a dead child of ours; None when it lives or is not our child."""
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if reaped else None


def kill_stray(pid: int) -> None:
    """Kill a child of ours that nobody looks after, and reap it when it has ended."""
    # It may have ended meanwhile.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    _reap_stray(pid, asyncio.get_running_loop())


def _reap_stray(pid: int, loop: asyncio.AbstractEventLoop) -> None:
    # Whoever else waits for it is first; one that hangs in the kernel ends when it is let go.
    def look() -> None:
        if reap(pid) is None and pid in child_pids():
            _reap_stray(pid, loop)

    loop.call_later(_STRAY_GRACE_S, look)


async def reap_group(group: int) -> None:
    """Kill and reap the orphans that a process of ours, dead and reaped, left in its group.

    Those that hang in the kernel are left behind.
    """
    for _ in range(_REAP_TRIES):
        try:
            found = os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            return
        if found is None:
            # Still ours, so the number cannot have passed on to others.
            os.killpg(group, signal.SIGKILL)
            await asyncio.sleep(_REAP_PAUSE_S)


def child_pids(pid: int | None = None) -> list[int]:
    """Children of a process, by default ours, dead ones included.

    None where the kernel does not list them, or the process is gone.
    """
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{'self' if pid is None else pid}/task").iterdir())
    except FileNotFoundError:
        return found
    # A process's children are listed under the thread that made or inherited them.
    for task in tasks:
        try:
            found.extend(int(child) for child in (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def become_subreaper() -> None:
    """Inherit the orphans below us, so that workers of a dead standby can be reaped."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def raise_open_files_limit() -> None:
    """Take all the descriptors we may: every gloo peer costs a worker some."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def wait_gone(pid: int) -> None:
    """Return when the process has ended; at once when there is none."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:
        # No descriptor is left: ask now and then, which takes none.
        while not _is_dead_child(pid):
            await asyncio.sleep(_ASK_PAUSE_S)
        return
    try:
        await _wait_readable(handle)
    except OSError:
        # The kernel watches no more of them for us.
        while not has_ended(handle):
            await asyncio.sleep(_ASK_PAUSE_S)
    finally:
        _close(handle)


async def _wait_readable(handle: int) -> None:
    loop = asyncio.get_running_loop()
    gone = loop.create_future()
    loop.add_reader(handle, _resolve, gone)
    try:
        await gone
    finally:
        loop.remove_reader(handle)


def has_ended(pidfd: int) -> bool:
    """Whether the process runs no more, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Signal a process that may have ended meanwhile."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return


def kill_leftovers(names: Iterable[ProcessName], *, timeout_s: float) -> list[ProcessName]:
    """SIGKILL whichever of these processes still run and wait; returns those that were killed."""
    deadline_s = time.monotonic() + timeout_s
    killed: list[ProcessName] = []
    for name in names:
        if process_name(name.pid) != name or zombie_status(name.pid) is not None:
            continue
        try:
            handle = os.pidfd_open(name.pid)
        except ProcessLookupError:
            continue
        try:
            # Between the check and the open the pid may have passed on.
            if process_name(name.pid) == name:
                _kill_group(name.pid)
                send_signal(handle, signal.SIGKILL)
                killed.append(name)
                left_s = max(0.0, deadline_s - time.monotonic())
                # Not select, which takes no descriptor above 1,023.
                end = select.poll()
                end.register(handle, select.POLLIN)
                end.poll(left_s * 1000)
        finally:
            _close(handle)
    return killed


def _close(handle: int) -> None:
    # The kernel lets go of it, whatever it says.
    with contextlib.suppress(OSError):
        os.close(handle)


def _kill_group(pid: int) -> None:
    """Kill the group that a process which runs leads, if it leads one."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)


def _is_dead_child(pid: int) -> bool:
    """Whether a child of ours has ended, reaped or not."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _resolve(gone: asyncio.Future[None]) -> None:
    if not gone.done():
        gone.set_result(None)


def stat_of(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; None when there is no such process.

    State, parent, group, session, ...: what comes before, the command, may hold blanks.
    """
    try:
        # A process may call itself anything; the kernel cuts its name after 15 bytes.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()
