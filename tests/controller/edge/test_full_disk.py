"""The journal's disk is full: nothing is decided, nobody is sent away, and it ends by itself."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from controller.core.changes import NodeForgotten, State
from controller.store.backend import DiskFullError
from controller.store.database import Database
from controller.store.journal import Journal
from controller.store.reserve import RESERVE_BYTES, Reserve
from outlast.clock import SystemClock
from outlast.ids import NodeId
from outlast.v1 import jobs_pb2
from outlast.v1.jobs_pb2_grpc import JobsStub
from tests.controller.fakes import lab, submit_request, until

DISK_BYTES = RESERVE_BYTES + 8 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for the reserve and a small journal."""
    with mounted(tmp_path / "disk", f"size={DISK_BYTES}") as folder:
        yield folder


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small disk can be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Take every byte that is left."""
    with (folder / "filler").open("ab", buffering=0) as file:
        for size_bytes in (2**20, 4_096, 1):
            try:
                while True:
                    file.write(b"\0" * size_bytes)
            except OSError:
                continue


def test_full_disk_makes_the_controller_read_only_until_there_is_room(small_disk: Path) -> None:
    async def scenario() -> None:
        async with lab(small_disk) as bench:
            first, second = await bench.add_agents(2)
            job_id = await bench.start_job()
            fill(small_disk)
            # Decisions go on until the log of the journal wants to grow; the last ones fit into
            # the reserve.
            error = await _refusal(bench.jobs)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "its disk is full" in str(error.details())
            assert "free room there" in str(error.details())
            # It is there for a moment whenever it is tried to take the room again.
            await until(lambda: not (small_disk / "reserve").exists(), "the reserve is given up")
            # What can be read is read, agents stay and may come back, and training goes on.
            assert (await bench.job(job_id)).state == "RUNNING"
            seq = await first.report(2.5, 2.25)
            await second.rejoin()
            health, metrics = await asyncio.to_thread(_look, bench.running.http)
            assert '"read_only"' in health
            assert "outlast_controller_read_only 1.0" in metrics
            assert first.acked_seq < seq
            # Somebody makes room.
            (small_disk / "filler").unlink()
            await until(lambda: first.acked_seq >= seq, "what waited is journalled")
            cancelled = await bench.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job_id))
            assert cancelled.job.state in ("CANCELLED", "SUSPENDING")
            assert (small_disk / "reserve").stat().st_size == RESERVE_BYTES
            await bench.reach(job_id, "CANCELLED")

    asyncio.run(scenario())


def test_controller_starts_on_a_full_disk(small_disk: Path) -> None:
    async def scenario() -> None:
        async with lab(small_disk) as bench:
            job_id = (await bench.jobs.Submit(submit_request("r1"))).job.job_id
        fill(small_disk)
        async with lab(small_disk) as bench:
            assert (await bench.job(job_id)).state == "QUEUED"
            await bench.add_agents(2)
            with pytest.raises(grpc.aio.AioRpcError, match="its disk is full"):
                await bench.jobs.Submit(submit_request("r2", name="other"))
            (small_disk / "filler").unlink()
            await until(lambda: bool(bench.agents[0].running), "the job starts")

    asyncio.run(scenario())


def test_reserve_is_taken_once_and_given_up_once(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path, size_bytes=2**16)
    assert reserve.acquire()
    assert reserve.acquire()
    assert (tmp_path / "reserve").stat().st_size == 2**16
    assert reserve.release()
    assert not reserve.release()
    assert reserve.free_bytes() > 0


def test_reserve_alone_is_no_room_while_the_disk_stays_full(small_disk: Path) -> None:
    """It was: read-only mode ended, the next write failed, and so on each second."""
    reserve = Reserve(small_disk)
    assert reserve.acquire()
    fill(small_disk)
    assert not reserve.acquire()
    # It is still there for the last that is decided.
    assert (small_disk / "reserve").stat().st_size == RESERVE_BYTES
    assert reserve.release()
    assert not reserve.acquire()
    assert not (small_disk / "reserve").exists()
    (small_disk / "filler").unlink()
    assert reserve.acquire()


def test_reserve_is_missing_and_nothing_fails_where_no_file_can_be_made(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64m,nr_inodes=8") as folder:
        with pytest.raises(OSError, match="No space left"):
            _make_files(folder)
        reserve = Reserve(folder)
        assert not reserve.acquire()
        (folder / "0").unlink()
        assert reserve.acquire()


def _make_files(folder: Path) -> None:
    for number in range(20):
        (folder / str(number)).touch()


@pytest.mark.parametrize("call", ["open", "posix_fallocate"])
def test_used_up_quota_is_a_full_disk_to_the_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def used_up(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    reserve = Reserve(tmp_path, size_bytes=2**16, margin_bytes=2**16)
    with monkeypatch.context() as patched:
        patched.setattr(os, call, used_up)
        assert not reserve.acquire()
    assert not (tmp_path / "reserve").exists()
    assert reserve.acquire()


def test_snapshot_that_does_not_fit_waits_and_stops_nobody(small_disk: Path) -> None:
    """It was tried in each turn, and each time the controller was read-only for a second."""
    database = Database(small_disk / "journal.sqlite")
    journal = Journal(database, SystemClock(), snapshot_least_bytes=4_096)
    try:
        journal.take_over()
        changes = [NodeForgotten(node=NodeId(f"{number:01000}")) for number in range(100)]
        journal.append(changes)
        assert journal.snapshot_is_due()
        fill(small_disk)
        filler = small_disk / "filler"
        os.truncate(filler, filler.stat().st_size - 2**20)
        with pytest.raises(DiskFullError):
            journal.write_snapshot(_Large(changes * 50))
        journal.drop_snapshot()
        assert not journal.snapshot_is_due()
        # What the log had grown by for it is there for what is decided.
        journal.append(changes[:5])
        assert journal.snapshot_is_due()
    finally:
        database.close()


class _Large(State):
    """A state of so many changes."""

    def __init__(self, changes: list[NodeForgotten]) -> None:
        super().__init__()
        self._changes = changes

    def as_changes(self) -> list[NodeForgotten]:  # type: ignore[override]  # narrower
        return self._changes


def test_limit_other_than_the_disk_s_makes_the_controller_read_only(tmp_path: Path) -> None:
    """SQLite calls a used-up quota a failed write, as it does with a limit of file sizes."""

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            log_bytes = (tmp_path / "journal.sqlite-wal").stat().st_size
            with _files_of_at_most(log_bytes + 2**16):
                error = await _refusal(bench.jobs)
                assert "its disk is full" in str(error.details())
            request = submit_request("later", name="later")

            async def is_taken() -> bool:
                try:
                    await bench.jobs.Submit(request)
                except grpc.aio.AioRpcError:
                    return False
                return True

            taken = asyncio.create_task(_again_until(is_taken))
            await until(taken.done, "it takes requests again")
            await taken

    asyncio.run(scenario())


async def _again_until(call: Callable[[], Awaitable[bool]]) -> None:
    while not await call():
        await asyncio.sleep(0.05)


@contextmanager
def _files_of_at_most(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond that: a write fails with EFBIG, no signal comes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def _refusal(jobs: JobsStub) -> grpc.aio.AioRpcError:
    """Submit jobs until the controller takes none."""
    for number in range(2_000):
        try:
            request = submit_request(f"full-{number}", name=f"job-{number}")
            await jobs.Submit(request)
        except grpc.aio.AioRpcError as error:
            return error
    raise AssertionError("the disk never was full")


def _look(http: str) -> tuple[str, str]:
    texts = []
    for path in ("healthz", "metrics"):
        with urllib.request.urlopen(f"http://{http}/{path}", timeout=10) as answer:
            texts.append(answer.read().decode())
    return texts[0], texts[1]
