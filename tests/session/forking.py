"""Scripts in forks of a process that has imported what they import: seconds less for each rank.

`python -m tests.session.forking MODULE...` imports, then forks a script for each line of JSON on
its input, and says on its output which process it is and how it ended.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any


class Forking:
    """The other end of such a process."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.session.forking", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._codes: dict[int, int] = {}
        self._new: list[int] = []
        self._running: set[int] = set()
        atexit.register(self._end)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Run a script with arguments; the id of its process."""
        document = {"command": list(command), "environment": dict(environment), "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(document).encode() + b"\n")
        self._process.stdin.flush()
        while not self._new:
            self._hear(time.monotonic() + 60.0)
        return self._new.pop()

    def wait(self, pid: int, deadline_s: float) -> int:
        """Its exit code; -N where signal N ended it."""
        until_s = time.monotonic() + deadline_s
        while pid not in self._codes:
            self._hear(until_s)
        return self._codes.pop(pid)

    def kill(self, pid: int) -> None:
        """Kill it unless it has ended."""
        if pid in self._running:
            os.kill(pid, signal.SIGKILL)
            self.wait(pid, 60.0)

    def _hear(self, until_s: float) -> None:
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], max(0.0, until_s - time.monotonic()))
        assert ready, "a script did not end in time"
        line = output.raw.readline()  # type: ignore[attr-defined]  # a pipe has one
        assert line, "the process that forks has ended; its errors are above"
        said = json.loads(line)
        if "code" in said:
            self._codes[said["pid"]] = said["code"]
            self._running.discard(said["pid"])
        else:
            self._new.append(said["pid"])
            self._running.add(said["pid"])

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60.0)


@cache
def forking(*modules: str) -> Forking:
    """One process for all that import the same; it ends with this one."""
    return Forking(modules)


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    job = _serve()
    if job is not None:
        # Out of all frames of the server: the script ends as a program does.
        _become(job)
        runpy.run_path(sys.argv[0], run_name="__main__")


def _serve() -> dict[str, Any] | None:
    """Fork and reap until the input ends; in a fork, what it is to run."""
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([0, *children], [], [])
        for descriptor in ready:
            if descriptor:
                pid = children.pop(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                _say(pid=pid, code=os.waitstatus_to_exitcode(status))
                continue
            line = _line()
            if not line:
                return None
            pid = os.fork()
            if not pid:
                for each in children:
                    os.close(each)
                document: dict[str, Any] = json.loads(line)
                return document
            children[os.pidfd_open(pid)] = pid
            _say(pid=pid)


def _line() -> bytes:
    """The next line, and not a byte more: `select` sees none that was read already."""
    line = bytearray()
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return bytes(line)


def _say(**said: int) -> None:
    os.write(1, json.dumps(said).encode() + b"\n")


def _become(job: Mapping[str, Any]) -> None:
    """Be the process that would run the script."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.argv = list(job["command"])
    sys.path.insert(0, str(Path(sys.argv[0]).parent))


if __name__ == "__main__":
    main()
