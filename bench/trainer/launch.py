"""Starts one process per rank, on loopback or each in a network namespace of its own.

A rank runs `python -m PROGRAM TASK ARGUMENTS` (`bench/member.py`) with one thread; what
rank 0 makes of its task is the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.member import RESULT_FILE
from outlast.ports import free_port

_ROOT = Path(__file__).parents[2]
_NETWORK = "10.232.78"
_CABLE = "v0"
_FRAME_BYTES = 65535


class Loopback:
    """All ranks on this machine's loopback."""

    interface = "lo"
    address = "127.0.0.1"

    def inside(self, rank: int) -> list[str]:
        """What a rank's command line begins with."""
        return []


class LimitedLink:
    """Two ranks, each in a namespace, joined by a cable of a given rate. Needs root.

    The kernel cuts what it sends into frames on the rank's own core. With frames of
    1,500 bytes that took half of the core while a message was on its way (a matrix
    product beside it: 68 ms became 151 ms), which a network card would not; so frames
    are as large as can be, and the rate is kept in bursts of two of them.
    """

    interface = _CABLE
    address = f"{_NETWORK}.1"

    def __init__(self) -> None:
        self._spaces = tuple(f"olb{os.getpid()}{side}" for side in "ab")

    def inside(self, rank: int) -> list[str]:
        """What a rank's command line begins with."""
        return ["ip", "netns", "exec", self._spaces[rank]]

    @contextmanager
    def laid(self) -> Iterator[LimitedLink]:
        """The cable, without a limit, for as long as it is needed."""
        with ExitStack() as stack:
            for space in self._spaces:
                _run("ip", "netns", "add", space)
                stack.callback(subprocess.run, ["ip", "netns", "del", space], check=False)
            one, other = self._spaces
            _run("ip", "link", "add", _CABLE, "netns", one, "type", "veth",
                 "peer", "name", _CABLE, "netns", other)  # fmt: skip
            for number, space in enumerate(self._spaces, start=1):
                _run("ip", "-n", space, "addr", "add", f"{_NETWORK}.{number}/24", "dev", _CABLE)
                _run("ip", "-n", space, "link", "set", "lo", "up")
                _run("ip", "-n", space, "link", "set", _CABLE,
                     "mtu", str(_FRAME_BYTES), "up")  # fmt: skip
            yield self

    def limit(self, megabits_per_s: float) -> None:
        """Give the cable a rate, both ways."""
        rate = f"{megabits_per_s:.3f}mbit"
        for space in self._spaces:
            _run("tc", "-n", space, "qdisc", "replace", "dev", _CABLE, "root",
                 "tbf", "rate", rate, "burst", str(2 * _FRAME_BYTES),
                 "latency", "400ms")  # fmt: skip

    def unlimit(self) -> None:
        """Let the cable carry what it can."""
        for space in self._spaces:
            _run("tc", "-n", space, "qdisc", "del", "dev", _CABLE, "root")


def run_ranks(
    task: str,
    arguments: dict[str, Any],
    *,
    world_size: int,
    place: Loopback | LimitedLink | None = None,
    program: str = "bench.trainer.rank",
    timeout_s: float = 900.0,
) -> Any:
    """What rank 0 makes of `task`; `program` is the module that knows the task.

    Raises:
        RuntimeError: a rank failed, with the end of its output.
    """
    where = place or Loopback()
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder, ExitStack() as stack:
        processes = []
        port = free_port()
        for rank in range(world_size):
            out = stack.enter_context((Path(folder) / f"{rank}.out").open("w+"))
            environment = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": where.address,
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": where.interface,
                "OMP_NUM_THREADS": "1",
                "MKL_NUM_THREADS": "1",
                "RES_OPTIONS": "timeout:1 attempts:1",
                "OUTLAST_BENCH_FOLDER": folder,
            }
            command = [sys.executable, "-m", program, task, json.dumps(arguments)]
            process = subprocess.Popen(
                [*where.inside(rank), *command],
                cwd=_ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, process)
            processes.append((process, Path(out.name)))
        _await(processes, timeout_s)
        return json.loads((Path(folder) / RESULT_FILE).read_text())


def _await(processes: Sequence[tuple[subprocess.Popen[bytes], Path]], timeout_s: float) -> None:
    for rank, (process, out) in enumerate(processes):
        code = process.wait(timeout=timeout_s)
        if code != 0:
            raise RuntimeError(f"rank {rank} ended with code {code}:\n{out.read_text()[-3000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
