"""What `outlast track` writes, read by TensorBoard itself, and by W&B's own reader of its runs."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outlast.tracking.points import Curve
from outlast.tracking.tensorboard import TensorBoard
from outlast.tracking.wandb import WandB
from outlast.v1 import jobs_pb2
from tests.cli.running import outlast
from tests.controller.fakes import lab
from tests.tracking.test_points import report

LOG_BLOCK = 1 << 15


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return [(each.step, each.value) for each in events.Scalars(tag)]


def test_tensorboard_reads_a_curve_that_was_written_in_two_goes(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    first.write(Curve(last_step=first.last_step).take([report(1, 4.0), report(2, 3.0)]))
    first.close()
    second = TensorBoard(tmp_path)
    assert second.last_step == 2
    second.write(Curve(last_step=second.last_step).take([report(2, 3.0), report(3, 2.0)]))
    second.close()
    assert scalars(tmp_path, "train/loss") == [(1, 4.0), (2, 3.0), (3, 2.0)]


def test_tensorboard_forgets_what_no_longer_holds(tmp_path: Path) -> None:
    tracker, curve = TensorBoard(tmp_path), Curve()
    tracker.write(curve.take([report(step, 4.0) for step in (1, 2, 3)]))
    tracker.write(curve.take([report(2, 5.0)]))
    tracker.close()
    assert scalars(tmp_path, "train/loss") == [(1, 4.0), (2, 5.0)]
    assert TensorBoard(tmp_path).last_step == 2


def test_wandb_keeps_a_run_without_its_server(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; pip install outlast[trackers]")
    options: dict[str, Any] = {"project": "tests", "job_id": "job-1", "offline": True}
    first = WandB(tmp_path, spec={"steps": 3}, **options)
    first.write(Curve(last_step=first.last_step).take([report(1, 4.0), report(2, 3.0)]))
    first.close()
    second = WandB(tmp_path, spec={"steps": 3}, **options)
    assert second.last_step == 2
    second.write(Curve(last_step=second.last_step).take([report(2, 3.0), report(3, 2.0)]))
    second.close()
    assert sorted(losses_in(tmp_path)) == [(1, 4.0), (2, 3.0), (3, 2.0)]


def test_a_job_is_tracked_until_it_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path / "state") as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            arguments = ("track", job_id, "--controller", bench.running.grpc)
            arguments += ("--tensorboard", str(tmp_path / "runs"))
            tracking = asyncio.create_task(asyncio.to_thread(outlast, *arguments))
            await bench.agents[0].report(4.0, 3.0)
            await bench.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job_id))
            done = await tracking
            assert done.returncode == 0, done.stderr
            assert f"{job_id} is CANCELLED; step 2 is written" in done.stderr
            assert scalars(tmp_path / "runs" / job_id, "train/loss") == [(1, 4.0), (2, 3.0)]

    asyncio.run(scenario())


def test_a_tracker_must_be_named() -> None:
    assert "give --tensorboard DIR or --wandb PROJECT" in outlast("track", "job").stderr


def losses_in(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses in all runs of a folder."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for path in folder.glob("wandb/offline-run-*/*.wandb"):
        for data in logged(path.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            items = {
                item.key or item.nested_key[0]: item.value_json for item in record.history.item
            }
            if "train/loss" in items:
                found.append((record.history.step.num, float(items["train/loss"])))
    return found


def logged(data: bytes) -> Iterator[bytes]:
    """The records of a run's file: a log as LevelDB has it, behind a head of seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if LOG_BLOCK - at % LOG_BLOCK < 7:
            at += LOG_BLOCK - at % LOG_BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            # Still being written.
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        # Whole, or the last part of one.
        if kind in (1, 4):
            yield whole
            whole = b""
