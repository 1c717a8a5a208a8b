"""Runs functions on several ranks, forked from one warm process.

Importing torch takes seconds, so one helper process does it once for the whole
test session and forks every rank, as the standby process does in production.
The helper runs no tensor operation, so its children may.

A function for ranks is a module-level function of a `tests.trainer.jobs*` module; it
takes a `RankContext` and picklable arguments and returns something picklable.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.few_cores import allow_huge_pages, share_cores

_LENGTH = struct.Struct("<Q")
_ROOT = Path(__file__).parents[2]
_KEPT: list[Any] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Who a forked rank is, and where its rendezvous is."""

    rank: int
    world_size: int
    port: int
    listen_fd: int

    def store(self) -> Any:
        """The rendezvous store of this run; None for a world of one."""
        if self.world_size == 1:
            return None
        from datetime import timedelta

        from torch.distributed import TCPStore

        store = TCPStore(
            "127.0.0.1",
            self.port,
            is_master=self.rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=self.listen_fd if self.rank == 0 else None,
        )
        # Rank 0's serves the others too, which may be behind.
        _KEPT.append(store)
        return store


class RankPool:
    """The pytest side: sends work to the helper process."""

    def __init__(self) -> None:
        self._results: dict[Any, list[Any]] = {}
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
            env=environment,
        )

    def run(
        self, job: Callable[..., Any], world_size: int, *arguments: Any, timeout_s: float = 120.0
    ) -> list[Any]:
        """What `job` returned on every rank, in rank order.

        Raises:
            AssertionError: with the traceback of the first rank that failed.
        """
        if (code := self._process.poll()) is not None:
            # Whatever ended it fails one test, not all that follow.
            sys.stderr.write(f"the helper process of the ranks had ended with {code}\n")
            with contextlib.suppress(OSError):
                self.close()
            self._process = self._start()
        name = (job.__module__, job.__qualname__)
        try:
            _send(self._process.stdin, (name, world_size, arguments, timeout_s))
            answers = _receive(self._process.stdout)
        except BaseException:
            # An answer that comes later would be taken for that to the next question.
            self._process.kill()
            self._process.wait()
            raise
        results = []
        for rank, (ok, payload) in enumerate(answers):
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{payload}")
            results.append(pickle.loads(payload))
        return results

    def run_once(self, job: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """As `run`, but tests that ask for the same share one result. Do not change it."""
        key = (job, world_size, arguments)
        if key not in self._results:
            self._results[key] = self.run(job, world_size, *arguments)
        return self._results[key]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def _send(pipe: Any, message: object) -> None:
    payload = pickle.dumps(message)
    pipe.write(_LENGTH.pack(len(payload)) + payload)
    pipe.flush()


def _receive(pipe: Any) -> Any:
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError("the helper process of the ranks has ended")
    return pickle.loads(pipe.read(_LENGTH.unpack(header)[0]))


def _serve() -> None:
    """The helper: import everything, then fork ranks on request."""
    from trainer.worker.hugepages import gather_pages
    from trainer.worker.standby_options import PRELOADED_MODULES

    share_cores()
    for path in sorted(Path(__file__).parent.glob("jobs*.py")):
        importlib.import_module(f"tests.trainer.{path.stem}")
    # What each rank would import for itself, as in the standby process.
    for module in PRELOADED_MODULES:
        importlib.import_module(module)
    # As the standby process: a rank copies fewer pages of what was imported. This one forks
    # thousands, for which huge pages pay.
    gc.freeze()
    allow_huge_pages(True)
    gather_pages()

    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    # Nothing that a child prints may end up among the answers.
    os.dup2(2, 1)
    while True:
        try:
            request = _receive(requests)
        except EOFError:
            return
        _send(answers, _run_ranks(*request))


def _run_ranks(
    name: tuple[str, str], world_size: int, arguments: Sequence[Any], timeout_s: float
) -> list[tuple[bool, Any]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        pipes: dict[int, int] = {}
        pids = []
        for rank in range(world_size):
            read_end, write_end = os.pipe()
            context = RankContext(
                rank=rank,
                world_size=world_size,
                port=listener.getsockname()[1],
                listen_fd=listener.fileno(),
            )
            pid = os.fork()
            if pid == 0:
                _child(write_end, name, context, arguments)
            os.close(write_end)
            pipes[read_end] = rank
            pids.append(pid)
        answers = _collect(pipes, pids, time.monotonic() + timeout_s)
    for pid in pids:
        os.waitpid(pid, 0)
    return answers


def _collect(
    pipes: dict[int, int], pids: Sequence[int], deadline_s: float
) -> list[tuple[bool, Any]]:
    """Every rank's answer; the first failure cuts the others' time short."""
    chunks: dict[int, list[bytes]] = {rank: [] for rank in pipes.values()}
    open_pipes = dict(pipes)
    while open_pipes and time.monotonic() < deadline_s:
        readable, _, _ = select.select(list(open_pipes), [], [], 0.2)
        for pipe in readable:
            chunk = os.read(pipe, 1 << 20)
            if chunk:
                chunks[open_pipes[pipe]].append(chunk)
                continue
            rank = open_pipes.pop(pipe)
            failed = not chunks[rank] or not pickle.loads(b"".join(chunks[rank]))[0]
            if failed:
                deadline_s = min(deadline_s, time.monotonic() + 3.0)
    for rank in open_pipes.values():
        os.kill(pids[rank], signal.SIGKILL)
        chunks[rank] = [pickle.dumps((False, "did not answer in time"))]
    for pipe in pipes:
        os.close(pipe)
    died = pickle.dumps((False, "died without an answer"))
    return [pickle.loads(b"".join(chunks[rank]) or died) for rank in range(len(pids))]


def _child(
    pipe: int, name: tuple[str, str], context: RankContext, arguments: Sequence[Any]
) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        job = getattr(sys.modules[name[0]], name[1])
        answer = (True, pickle.dumps(job(context, *arguments)))
    except BaseException:  # noqa: BLE001  # whatever it is belongs to the test that asked
        answer = (False, traceback.format_exc())
    with os.fdopen(pipe, "wb") as out:
        out.write(pickle.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    _serve()
