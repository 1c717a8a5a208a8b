"""Ctrl-C ends `outlast simulate` at once, and nothing of it stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

DEADLINE_S = 60.0
# Long enough not to end by itself before it is interrupted.
COMMAND = ("simulate", "--nodes", "96", "--days", "2", "--rate", "40", "--json")


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def _take_interrupts() -> None:
    """Where the tests were started in the background of a shell, children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupted_comparison_ends_with_all_its_processes() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "outlast.cli.main", *COMMAND],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_take_interrupts,
    ) as process:
        parent = psutil.Process(process.pid)

        def compares() -> bool:
            return sum("spawn_main" in " ".join(c.cmdline()) for c in parent.children()) == 2

        try:
            _wait(compares, "no comparison was begun")
            children = parent.children(recursive=True)
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
        assert process.returncode == 130
        assert out == b""
        _wait(lambda: not any(map(psutil.Process.is_running, children)), "processes are left")
