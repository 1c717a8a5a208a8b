"""Processes as the kernel's tables show them, whatever they call themselves."""

from __future__ import annotations

import os
import subprocess
import sys

from controller.agent.workers.processes import process_name, process_state
from controller.local.processes import members_of, session_of

# Longer than the 15 bytes that the kernel keeps, which end within a letter.
CALLS_ITSELF = """
import ctypes, sys
PR_SET_NAME = 15
ctypes.CDLL(None).prctl(PR_SET_NAME, "Datenlader (1)\\u00fc".encode())
print(open("/proc/self/comm", "rb").read(), flush=True)
sys.stdin.read()
"""


def test_a_process_may_call_itself_anything() -> None:
    command = [sys.executable, "-c", CALLS_ITSELF]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert rb"Datenlader (1)\xc3\n" in process.stdout.readline()
        name = process_name(process.pid)
        assert name is not None
        assert name.pid == process.pid
        assert process_state(process.pid) in ("R", "S")
        assert members_of([process.pid]) == [process.pid]
        assert session_of(process.pid) == process.pid != session_of(os.getpid())
        assert process.stdin is not None
        process.stdin.close()
    assert process_name(process.pid) is None
