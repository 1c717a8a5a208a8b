"""The journal's disk is full: nothing is decided, nobody is sent away, and it ends by itself."""

from __future__ import annotations

import asyncio
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from controller.store.reserve import RESERVE_BYTES, Reserve
from outlast.v1 import jobs_pb2
from outlast.v1.jobs_pb2_grpc import JobsStub
from tests.controller.fakes import lab, submit_request, until

DISK_BYTES = RESERVE_BYTES + 8 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for the reserve and a small journal."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
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
            assert not (small_disk / "reserve").exists()
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
    assert reserve.release()
    assert not reserve.release()
    assert reserve.free_bytes() > 0


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
