"""Ranks that stand still, as their agent sees them; and what it keeps before a stop."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controller.agent.core.buffer import Weight
from controller.agent.observe.host import Host
from controller.agent.observe.metrics.host import Folders
from controller.agent.observe.oom import OomKills
from controller.agent.observe.stall_watch import StallWatch
from controller.agent.workers import py_spy, stacks
from controller.agent.workers.processes import process_state
from controller.agent.workers.worker import Worker
from outlast.blackbox import Group, Op, Phase, StepRecord, Writer
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerFiles
from tests.agent.harness import wait_for

SLEEPER = """
import time
def waits_for_ever():
    print("here", flush=True)
    while True:
        time.sleep(60)
waits_for_ever()
"""


@contextmanager
def worker_of(folder: Path, pid: int) -> Iterator[tuple[Worker, Writer]]:
    """A worker whose process is `pid`, and the writer's end of its black box."""
    loop = asyncio.new_event_loop()
    paths = WorkerFiles.below(folder, 1)
    box = Writer(paths.blackbox, rank=1, world_size=2, attempt=1)
    worker = Worker(
        job_id="job",
        attempt=1,
        rank=1,
        paths=paths,
        requested_ns=0,
        gone=loop.create_future(),
        pid=pid,
    )
    try:
        yield worker, box
    finally:
        worker.close()
        box.close()
        loop.close()


def step(box: Writer, number: int) -> None:
    """One step with one operation."""
    box.phase(Phase.FORWARD_BACKWARD)
    box.enter(Op.ALL_REDUCE, Group.DP)
    box.leave()
    box.phase(Phase.OPTIMIZER)
    box.completed(
        StepRecord(
            step=number,
            loss=1.0,
            grad_norm=1.0,
            learning_rate=0.1,
            tokens=8,
            start_ns=0,
            end_ns=1,
            eval_loss=None,
        )
    )


def test_a_rank_that_stands_too_long_is_told_once_with_where_it_stands(tmp_path: Path) -> None:
    told: list[str] = []
    with worker_of(tmp_path, os.getpid()) as (worker, box):
        stall_watch = StallWatch(lambda: [worker], lambda: told.append("crossed"))
        now_s = 0.0
        box.resumed(0)
        for number in range(1, 31):
            step(box, number)
            now_s += 0.2
            stall_watch.look(now_s)
        box.phase(Phase.FORWARD_BACKWARD)
        box.enter(Op.ALL_REDUCE, Group.DP)
        for _ in range(20):
            now_s += 0.2
            stall_watch.look(now_s)
        assert told == ["crossed"]
        summary = agents_pb2.RankSummary()
        stall_watch.describe(worker, summary)
        assert summary.stalled_s > summary.stall_limit_s > 1.0
        assert "forward_backward" in summary.stall_limit_source
        assert summary.entered["dp"] == 31
        assert summary.process_state in ("R", "S")
        box.leave()
        stall_watch.look(now_s + 0.2)
        assert told == ["crossed", "crossed"]
        moving = agents_pb2.RankSummary()
        stall_watch.describe(worker, moving)
        assert moving == agents_pb2.RankSummary()


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[int]:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    process = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    wait_for(lambda: process_state(process.pid) == "S", "the process to sleep")
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed")
@pytest.mark.parametrize("is_stopped", [False, True], ids=["asleep", "stopped"])
def test_stacks_of_a_process_are_kept_whatever_it_does(
    tmp_path: Path, sleeper: int, is_stopped: bool
) -> None:
    if is_stopped:
        os.kill(sleeper, signal.SIGSTOP)
        wait_for(lambda: process_state(sleeper) == "T", "the process to stop")
    with worker_of(tmp_path, sleeper) as (worker, _):
        own, found = asyncio.run(stacks.collect([worker], within_s=60.0))
    assert own.rank == -1
    assert found.rank == 1
    state = "stopped by a signal" if is_stopped else "asleep"
    assert found.location.startswith(f"{state} at waits_for_ever (sleeper.py:")
    (path,) = found.paths
    assert "waits_for_ever" in Path(path).read_text()


def test_without_the_tool_the_state_remains(
    tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(py_spy, "find", lambda: None)
    with worker_of(tmp_path, sleeper) as (worker, _):
        _, found = asyncio.run(stacks.collect([worker], within_s=60.0))
    assert found.location.startswith("asleep at ")
    assert "outlast[stacks]" in found.text


@pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed")
def test_without_descriptors_the_state_remains(
    tmp_path: Path, sleeper: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_file(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", no_file)
    with worker_of(tmp_path, sleeper) as (worker, _):
        found = asyncio.run(stacks.collect([worker], within_s=60.0))
    assert all("Too many open files" in told.text for told in found)
    assert found[1].text.startswith(f"process {sleeper}: asleep")


@pytest.mark.skipif(py_spy.find() is None, reason="py-spy is not installed")
def test_what_takes_too_long_is_left_out_and_the_state_remains(
    tmp_path: Path, sleeper: int
) -> None:
    with worker_of(tmp_path, sleeper) as (worker, _):
        _, found = asyncio.run(stacks.collect([worker], within_s=0.0))
    assert found.rank == 1
    assert found.location.startswith("asleep at ")
    assert "took longer than 0 s" in found.text


def test_the_flight_recorder_is_asked_for_and_waited_for_where_torch_listens(
    tmp_path: Path, sleeper: int
) -> None:
    pipe, record = tmp_path / "nccl-1.pipe", tmp_path / "nccl-1"
    os.mkfifo(pipe)
    record.write_text("of an earlier hang")
    handle = os.open(pipe, os.O_RDWR)

    def write_down() -> None:
        assert os.read(handle, 16) == b"1\n"
        assert not record.exists()
        record.write_text("of this one")

    torch = threading.Thread(target=write_down)
    torch.start()
    try:
        with worker_of(tmp_path, sleeper) as (worker, _):
            _, found = asyncio.run(stacks.collect([worker], within_s=60.0))
    finally:
        torch.join()
        os.close(handle)
    assert str(record) in found.paths
    assert record.read_text() == "of this one"


def test_a_flight_record_that_never_comes_is_not_promised(tmp_path: Path, sleeper: int) -> None:
    os.mkfifo(tmp_path / "nccl-1.pipe")
    with worker_of(tmp_path, sleeper) as (worker, _):
        _, found = asyncio.run(stacks.collect([worker], within_s=0.5))
    assert not any("nccl" in path for path in found.paths)


def host_at(tmp_path: Path) -> tuple[Host, list[agents_pb2.AgentEvent]]:
    """A look at a made-up machine, whose /proc is below `tmp_path`."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "data").mkdir()
    told: list[agents_pb2.AgentEvent] = []

    def emit(event: agents_pb2.AgentEvent, weight: Weight) -> None:
        assert weight is Weight.LASTING
        told.append(event)

    folders = Folders(
        state_dir=tmp_path / "none", memory_dir=tmp_path / "none", data_dir=tmp_path / "data"
    )
    host = Host(folders, emit, workers=list, oom_kills=OomKills(tmp_path), root=tmp_path)
    return host, told


def test_a_process_killed_for_want_of_memory_is_told(tmp_path: Path) -> None:
    host, told = host_at(tmp_path)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 500 kB\n")
    (tmp_path / "proc/vmstat").write_text("oom_kill 4\n")
    host.look()
    (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
    host.look()
    (event,) = told
    assert event.host_sign.subject == "host_memory"
    assert "killed 1 processes" in event.host_sign.message


def test_a_container_s_own_limit_counts(tmp_path: Path) -> None:
    host, told = host_at(tmp_path)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    cgroup = tmp_path / "sys/fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("1000\n")
    (cgroup / "memory.current").write_text("990\n")
    (cgroup / "memory.stat").write_text("inactive_file 10\n")
    host.look()
    assert [event.host_sign.message for event in told] == [
        "2.0% of its memory is left (limit 5%, ours)"
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_told_and_room_on_it_too(tmp_path: Path) -> None:
    host, told = host_at(tmp_path)
    disk = tmp_path / "data"
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=False
    ).returncode:
        pytest.skip("this machine mounts nothing")
    try:
        (disk / "filler").write_bytes(b"x" * (shutil.disk_usage(disk).free - 4096))
        host.look()
        (disk / "filler").unlink()
        host.look()
    finally:
        subprocess.run(["umount", disk], check=True)
    assert [event.host_sign.subject for event in told] == ["disk", "disk"]
    assert "folder 'data' is free" in told[0].host_sign.message
    assert told[1].host_sign.message == ""
