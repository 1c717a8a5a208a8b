"""The standby process alone: real forks, real signals."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.agent.workers.processes import process_state
from outlast.worker_contract import WorkerFiles
from tests.agent.harness import DEADLINE_S, REPOSITORY, wait_for
from tests.contracts import contract_of

FAST = ("--entry=tests.agent.entry:run", "--preload=")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


class StandbyProcess:
    """A standby process with our end of its control socket."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.control, theirs = socket.socketpair()
        self.unread = b""
        fds = (theirs.fileno(), self.listening.fileno())
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "trainer.worker.standby"),
                *("--control-fd", str(fds[0]), "--rendezvous-fd", str(fds[1])),
                *arguments,
            ],
            cwd=REPOSITORY,
            env={**os.environ, **ENVIRONMENT},
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def tell(self, **request: object) -> None:
        self.control.sendall(json.dumps(request).encode() + b"\n")

    def hear(self, timeout_s: float = DEADLINE_S) -> dict[str, Any]:
        """The next message."""
        while b"\n" not in self.unread:
            readable, _, _ = select.select([self.control], [], [], timeout_s)
            assert readable, "the standby process says nothing"
            data = self.control.recv(65536)
            assert data, "the standby process closed its end"
            self.unread += data
        line, _, self.unread = self.unread.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    def fork(self, rank: int, behaviour: str = "train", *, rendezvous: bool = False) -> int:
        """Fork a worker that behaves so; its pid."""
        self.tell(
            op="fork", key=f"job/1/{rank}", contract=self.contract(rank, behaviour, rendezvous)
        )
        message = self.hear(timeout_s=DEADLINE_S)
        assert message["event"] == "forked", message
        assert message["key"] == f"job/1/{rank}"
        return int(message["pid"])

    def contract(self, rank: int, behaviour: str, rendezvous: bool = False) -> dict[str, str]:
        data = self.folder / f"data-{rank}"
        data.mkdir(exist_ok=True)
        (data / "behaviour.json").write_text(json.dumps({str(rank): behaviour}))
        return contract_of(
            self.folder,
            rank,
            job_id="job",
            world_size=max(2, rank + 1),
            data_dir=data,
            rendezvous_fd=99 if rendezvous else None,
        ).to_env()

    def log(self, rank: int) -> str:
        path = WorkerFiles.below(self.folder, rank).log
        return path.read_text() if path.exists() else ""

    def first_line(self, rank: int) -> str:
        """What a worker printed first, once it has."""
        return wait_for(lambda: self.log(rank).splitlines(keepends=True)[:1], "a line")[0]

    def close(self) -> None:
        self.control.close()
        self.listening.close()
        self.process.wait(timeout=DEADLINE_S)


Start = Callable[..., StandbyProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[StandbyProcess] = []

    def start(*arguments: str) -> StandbyProcess:
        started.append(StandbyProcess(tmp_path, *(arguments or FAST)))
        return started[-1]

    yield start
    for standby in started:
        standby.close()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_exit_codes_and_signals_are_reported(start: Start) -> None:
    standby = start()
    assert standby.hear()["event"] == "ready"
    standby.fork(0, "exit:7")
    ended = standby.hear()
    assert (ended["event"], ended["key"]) == ("exited", "job/1/0")
    assert os.waitstatus_to_exitcode(ended["status"]) == 7
    pid = standby.fork(1)
    os.kill(pid, signal.SIGKILL)
    ended = standby.hear()
    assert (ended["pid"], os.waitstatus_to_exitcode(ended["status"])) == (pid, -signal.SIGKILL)


def test_stopped_worker_dies_of_sigkill(start: Start) -> None:
    standby = start()
    standby.hear()
    pid = standby.fork(0)
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(standby.hear()["status"]) == -signal.SIGKILL


def test_exception_that_escapes_is_written_down(start: Start, tmp_path: Path) -> None:
    standby = start()
    standby.hear()
    standby.fork(0, "raise")
    assert os.waitstatus_to_exitcode(standby.hear()["status"]) == 1
    report = json.loads(WorkerFiles.below(tmp_path, 0).error.read_text())
    assert report["type"] == "builtins.ValueError"
    assert report["message"] == "loss is not finite at step 3"
    assert "in train" in report["traceback"]
    assert "about to fail" in standby.log(0)
    assert "ValueError" in standby.log(0)


def test_end_of_the_control_socket_kills_workers_and_standby(start: Start) -> None:
    standby = start()
    standby.hear()
    pids = [standby.fork(rank, "ignore-term") for rank in (0, 1)]
    standby.control.close()
    wait_for(lambda: all(is_gone(pid) for pid in pids), "workers gone")
    assert standby.process.wait(timeout=DEADLINE_S) == 0


def test_modules_put_away_what_they_keep_when_the_standby_ends(
    start: Start, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    module = f"import atexit, os\natexit.register(os.unlink, {str(kept)!r})\n"
    (tmp_path / "keeping.py").write_text(module)
    standby = start(*FAST, "--extra=keeping", f"--folder={tmp_path}")
    assert standby.hear()["left_out"] == {}
    standby.fork(0, "exit:0")
    assert standby.hear()["event"] == "exited"
    assert kept.exists(), "a worker has put away what is the standby's"
    standby.tell(op="exit")
    assert standby.process.wait(timeout=DEADLINE_S) == 0
    assert not kept.exists()


def test_adopted_worker_of_a_dead_standby_dies_with_the_next_one(start: Start) -> None:
    first, second = start(), start()
    first.hear()
    second.hear()
    pid = first.fork(0, "ignore-term")
    first.process.kill()
    first.process.wait()
    assert not is_gone(pid)
    second.tell(op="adopt", key="job/1/0", pid=pid)
    second.tell(op="adopt", key="job/1/1", pid=2**22 - 1)
    second.fork(1, "exit:0")
    second.hear()
    assert not is_gone(pid)
    second.tell(op="exit")
    assert second.process.wait(timeout=DEADLINE_S) == 0
    # An orphan is reaped by whoever inherited it; a zombie is as dead.
    wait_for(lambda: process_state(pid) in ("", "Z"), "orphan killed")


def test_worker_wakes_up_with_nothing_of_the_standby(start: Start) -> None:
    standby = start()
    standby.hear()
    facts = {}
    for rank, rendezvous in ((0, True), (1, False)):
        standby.fork(rank, "facts", rendezvous=rendezvous)
        facts[rank] = json.loads(standby.first_line(rank))
    listening = os.readlink(f"/proc/self/fd/{standby.listening.fileno()}")
    for rank, said in facts.items():
        inherited = said["descriptors"]
        assert inherited.pop("0") == "/dev/null"
        for output in ("1", "2"):
            assert inherited.pop(output).endswith(f"{rank}.log")
        sockets = [target for target in inherited.values() if target.startswith("socket")]
        assert sockets == ([listening] if rank == 0 else [])
        assert len(inherited) == len(sockets)
        assert said["process_group"] == said["pid"]
        assert said["session"] == os.getsid(standby.process.pid)
        assert said["modules"] == []
        assert said["sigint_default"]
        assert said["collects_garbage"]


def test_many_forks_leave_no_descriptors_in_the_standby(start: Start) -> None:
    standby = start()
    standby.hear()
    standby.fork(0, "exit:0")
    standby.hear()
    folder = Path(f"/proc/{standby.process.pid}/fd")
    before = len(list(folder.iterdir()))
    for _ in range(30):
        standby.fork(0, "exit:0")
        standby.hear()
    assert len(list(folder.iterdir())) == before


def test_standby_with_a_second_thread_refuses_to_fork(start: Start) -> None:
    standby = start("--entry=tests.agent.threaded_entry:run", "--preload=")
    standby.hear()
    standby.tell(op="fork", key="job/1/0", contract=standby.contract(0, "train"))
    refused = standby.hear()
    assert (refused["event"], refused["key"]) == ("refused", "job/1/0")
    assert "2 threads" in refused["detail"]


def waited_for_a_core_s(pid: int) -> float:
    """Time in which a process could have run and another one did."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def test_full_standby_has_one_thread_and_forks_in_milliseconds(start: Start) -> None:
    standby = start("--entry=tests.agent.entry:run")
    assert standby.hear(timeout_s=120.0)["event"] == "ready"
    assert len(list(Path(f"/proc/{standby.process.pid}/task").iterdir())) == 1
    maps = Path(f"/proc/{standby.process.pid}/maps").read_text()
    assert "libtorch" in maps
    assert "grpc" not in maps
    latencies_s = []
    for _ in range(10):
        started_s, waited_s = time.monotonic(), waited_for_a_core_s(standby.process.pid)
        standby.fork(0, "exit:0")
        elsewhere_s = waited_for_a_core_s(standby.process.pid) - waited_s
        latencies_s.append(time.monotonic() - started_s - elsewhere_s)
        standby.hear()
    print("fork latencies:", sorted(latencies_s))
    # 6 to 10 ms on an idle machine; the best of ten hardly sees other work.
    assert min(latencies_s) < 0.05
