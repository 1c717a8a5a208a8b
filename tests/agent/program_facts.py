"""A program that says what it finds itself in: one line of JSON on standard output."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys


def facts() -> dict[str, object]:
    """What must be the same, however the program was started, and what must not."""
    numpy = sys.modules.get("numpy")
    return {
        "same": {
            # First: nobody writes before the program leads its group.
            "input": sys.stdin.readline(),
            "name": __name__,
            "arguments": sys.argv[1:],
            "file": os.path.basename(sys.argv[0]),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "descriptors": {number: _target(number) for number in _descriptors()},
            "leads_group": os.getpgrp() == os.getpid(),
            "session": os.getsid(0),
            "parent": os.getppid(),
            "handlers": {
                number: str(signal.getsignal(number)).split(" at ")[0]
                for number in sorted(signal.valid_signals())
            },
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "threads": len(os.listdir("/proc/self/task")),
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
            # The current folder is not on it.
            "path": sys.path,
        },
        "pid": os.getpid(),
        "drawn": [random.random(), None if numpy is None else float(numpy.random.random())],
        "modules": sorted(sys.modules),
    }


def _descriptors() -> list[int]:
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")]


def _target(number: int) -> str:
    """What a descriptor is of: pipes by kind, files by name."""
    target = os.readlink(f"/proc/self/fd/{number}")
    return target if target.startswith("/") else target.partition(":")[0]


if __name__ == "__main__":
    print(json.dumps(facts()))
    print("to the log", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
