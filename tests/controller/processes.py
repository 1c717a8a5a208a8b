"""A controller in a process of its own, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controller import join_token
from controller.agent.workers.processes import process_name, zombie_status
from controller.local.processes import members_of

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0


def join_arguments(state_dir: Path) -> list[str]:
    """Options of an agent that joins the controller of a state directory."""
    token = state_dir / join_token.FILE_NAME
    return ["--join-token-file", str(token)] if token.exists() else []


PROGRAM = ("controller",)
# As a person starts it, with local nodes.
UP = ("outlast.cli.main", "up")


class Controller:
    """A controller on a state directory; `program` is a module and its first arguments."""

    def __init__(
        self, state_dir: Path, *arguments: str, program: tuple[str, ...] = PROGRAM
    ) -> None:
        self.state_dir = state_dir
        self.program = program
        self.arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None
        # A file: nobody reads while tests run, and a pipe that is full would hold the controller.
        self.stderr = state_dir.with_name(f"{state_dir.name}.stderr")

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self.stderr.parent.mkdir(parents=True, exist_ok=True)
        with self.stderr.open("ab") as log:
            self.process = subprocess.Popen(
                command(self.state_dir, *self.arguments, program=self.program),
                cwd=ROOT,
                stderr=log,
            )
        wait_for(lambda: self.file().get("pid") == self.pid, "it listens", lambda: self._check())

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def file(self) -> dict[str, object]:
        """controller.json, empty when there is none."""
        try:
            document: dict[str, object] = json.loads(
                (self.state_dir / "controller.json").read_text()
            )
        except FileNotFoundError:
            return {}
        return document

    @property
    def grpc(self) -> str:
        return str(self.file()["grpc"])

    @property
    def http(self) -> str:
        return str(self.file()["http"])

    @property
    def join_arguments(self) -> list[str]:
        """What an agent that is started by hand must show."""
        return join_arguments(self.state_dir)

    def kill(self) -> None:
        """SIGKILL, with no chance to clean up."""
        assert self.process is not None
        self.process.kill()
        self._reap()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Ask it to end; its exit code and how long it took."""
        assert self.process is not None
        begun_s = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self._reap()
        return code, time.monotonic() - begun_s

    def _check(self) -> None:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the controller ended: {self.stderr.read_text()}")

    def _reap(self) -> None:
        assert self.process is not None
        self.process.wait()
        self.process = None


def command(state_dir: Path, *arguments: str, program: tuple[str, ...] = PROGRAM) -> list[str]:
    """The command line of a controller on free ports."""
    ports = () if "--grpc" in arguments else ("--grpc", "127.0.0.1:0")
    ports += () if "--http" in arguments else ("--http", "127.0.0.1:0")
    options = ("--state-dir", str(state_dir), *ports, *arguments)
    return [sys.executable, "-m", *program, *options]


def refusal(state_dir: Path, *arguments: str) -> str:
    """What a controller that cannot start says; it must be one line and code 2."""
    done = subprocess.run(
        command(state_dir, *arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


@contextmanager
def controller(
    state_dir: Path, *arguments: str, program: tuple[str, ...] = PROGRAM
) -> Iterator[Controller]:
    """A controller that listens; whatever it started is gone after the block."""
    it = Controller(state_dir, *arguments, program=program)
    it.start()
    try:
        yield it
    finally:
        if it.process is not None:
            it.stop()
        for pid in members_of(list(node_pids(state_dir).values())):
            os.kill(pid, signal.SIGKILL)


def node_pids(state_dir: Path) -> dict[str, int]:
    """Agents that were started for local nodes and have not been stopped in order."""
    files = sorted((state_dir / "nodes").glob("*/process.json"))
    return {file.parent.name: int(json.loads(file.read_text())["pid"]) for file in files}


def is_alive(pid: int) -> bool:
    return process_name(pid) is not None and zombie_status(pid) is None


def wait_for(
    condition: object, what: str, check: object = None, *, within_s: float = DEADLINE_S
) -> None:
    """Wait for a condition, looking often."""
    deadline_s = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        if check is not None:
            check()  # type: ignore[operator]
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        time.sleep(0.01)
