"""Runs a script in which SIGUSR1 raises an exception: `python raising.py SCRIPT ARGUMENTS`."""

from __future__ import annotations

import runpy
import signal
import sys


def _raise(number: int, frame: object) -> None:
    raise RuntimeError("raised by the test")


signal.signal(signal.SIGUSR1, _raise)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
