"""Commands go on where they were when a login ends and has been renewed meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outlast.cli.errors import ExitCode
from outlast.v1 import jobs_pb2
from tests.cli.running import outlast
from tests.controller.access.logins import end_login
from tests.controller.fakes import lab
from tests.tracking.test_trackers import scalars


def test_diagnose_tells_each_finding_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = end_login(monkeypatch, "WatchDiagnostics", answers=2)

    async def scenario() -> None:
        async with lab(tmp_path / "state") as bench:
            await bench.add_agents(2)
            for agent in bench.agents:
                agent.verdicts["preflight"] = "fail"
            where = ("--controller", bench.running.grpc)
            done = await asyncio.to_thread(outlast, "diagnose", *where)
            assert done.returncode == ExitCode.JOB_FAILED, done.stderr
            progress, _, _ = done.stdout.partition("\nrun ")
            for agent in bench.agents:
                assert progress.count(f"{agent.node}  device  fail") == 1
            assert ended

    asyncio.run(scenario())


def test_track_writes_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = end_login(monkeypatch, "WatchJob", answers=1)

    async def scenario() -> None:
        async with lab(tmp_path / "state") as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            await bench.agents[0].report(4.0, 3.0)
            arguments = ("track", job_id, "--controller", bench.running.grpc)
            arguments += ("--tensorboard", str(tmp_path / "runs"))
            tracking = asyncio.create_task(asyncio.to_thread(outlast, *arguments))
            losses = [(1, 4.0), (2, 3.0)]
            while not ended:
                losses.append((len(losses) + 1, 2.0))
                await bench.agents[0].report(2.0, first_step=len(losses))
                await asyncio.sleep(0.1)
            await bench.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job_id))
            done = await tracking
            assert done.returncode == 0, done.stderr
            assert scalars(tmp_path / "runs" / job_id, "train/loss") == losses

    asyncio.run(scenario())
