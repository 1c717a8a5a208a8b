"""Child processes for things that may hang, crash or lie.

A device that is going bad blocks in the driver or takes its process with it,
so everything that touches one runs in a forked child with a deadline. A child
dies with its parent, whatever kills the parent, and so do its own children.

What does not belong here: what the children do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

_PR_SET_PDEATHSIG = 1
# A killed process leaves within milliseconds, unless it is stuck in the kernel.
_KILL_WAIT_S = 2.0
_MAX_LINE_BYTES = 1 << 20


class DeadlineError(Exception):
    """The child had not ended when its deadline had passed."""


class ChildDiedError(Exception):
    """The child ended by a signal or with an exit code other than 0."""


def fork(body: Callable[[], None]) -> int:
    """Run `body` in a forked child and return its pid.

    The child ends with exit code 0 when `body` returns and 1 when it raises;
    its standard output is its standard error, since the parent's standard
    output carries findings.
    """
    assert num_threads() == 1, "a child forked beside threads may inherit their locks"
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(2, 1)
        body()
        code = 0
    except BaseException:  # noqa: BLE001 - a child must never return into its parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def lines_of_child(body: Callable[[int], None], deadline_s: float) -> Iterator[str]:
    """Fork `body`, which gets a descriptor to write lines to, and yield them as they come.

    Raises:
        DeadlineError: it was still running after `deadline_s`; it has been killed.
        ChildDiedError: it ended otherwise than by returning.
    """
    ends_at = time.monotonic() + deadline_s
    receiver, sender = os.pipe()

    def child() -> None:
        os.close(receiver)
        body(sender)

    pid = fork(child)
    os.close(sender)
    try:
        yield from _lines(receiver, ends_at, deadline_s)
        status = _wait(pid, ends_at - time.monotonic())
        if status is None:
            raise DeadlineError(f"still running after {deadline_s:g} s")
        pid = 0
        if status:
            raise ChildDiedError(describe(status))
    finally:
        os.close(receiver)
        if pid:
            kill(pid)


def kill(pid: int) -> bool:
    """Kill a child and reap it; False if it is stuck in the kernel and stays."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return _wait(pid, _KILL_WAIT_S) is not None


def describe(status: int) -> str:
    """A wait status in words."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    return f"killed by {signal.Signals(-code).name}"


def num_threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, its parent, ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def tied() -> Callable[[], None]:
    """What a program of this process does before it starts (`preexec_fn`): it dies with us.

    A check that is killed at its deadline takes nothing along by itself.
    """
    return partial(die_with, os.getpid())


def _lines(receiver: int, ends_at: float, deadline_s: float) -> Iterator[str]:
    """Lines until every writer has closed the pipe."""
    poll = select.poll()
    poll.register(receiver, select.POLLIN)
    rest = b""
    while True:
        left_s = ends_at - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise DeadlineError(f"still running after {deadline_s:g} s")
        data = os.read(receiver, 65536)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise ChildDiedError(f"wrote a line of more than {_MAX_LINE_BYTES} bytes")
        for line in whole:
            yield line.decode(errors="replace")


def _wait(pid: int, timeout_s: float) -> int | None:
    """The wait status of a child; None when it has not ended in time."""
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return None
    finally:
        os.close(handle)
    return os.waitpid(pid, 0)[1]
