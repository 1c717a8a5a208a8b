"""`outlast profile` against a controller whose agents say what a test has them say."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outlast.cli.errors import ExitCode
from outlast.v1 import agents_pb2
from tests.cli.running import TIMEOUT_S, Done, outlast
from tests.controller.fakes import Lab, lab, until


def profile(functions: dict[str, int]) -> bytes:
    """Of a main thread that was so many samples in each function."""
    document = {
        "shared": {"frames": [{"name": name, "file": f"/a/{name}.py"} for name in functions]},
        "profiles": [
            {
                "name": 'Thread 1 "MainThread"',
                "samples": [
                    [at] for at, many in enumerate(functions.values()) for _ in range(many)
                ],
                "weights": [0.01] * sum(functions.values()),
            }
        ],
    }
    speedscope = gzip.compress(json.dumps(document).encode())
    return agents_pb2.RankProfile(speedscope=speedscope).SerializeToString()


def with_job(folder: Path, scenario: Callable[[Lab, str], Awaitable[None]]) -> None:
    """A job of two ranks on two nodes."""

    async def run() -> None:
        async with lab(folder) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            await scenario(bench, job_id)

    asyncio.run(run())


async def command(bench: Lab, *arguments: str) -> Done:
    where = ("--controller", bench.running.grpc)
    return await asyncio.to_thread(outlast, "profile", *arguments, *where)


def test_ranks_are_side_by_side_and_in_one_file(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str) -> None:
        bench.agents[0].logs = profile({"wait": 3, "step": 1})
        bench.agents[1].logs = profile({"step": 4})
        file = tmp_path / "both.json.gz"
        both = ("--rank", "1", "--rank", "0", "--rank", "1")
        done = await command(bench, job_id, *both, "--seconds", "1", "-o", str(file))
        assert done.returncode == ExitCode.OK, done.stderr
        assert [line.split() for line in done.stdout.splitlines()] == [
            ["RANK", "1", "RANK", "0", "FUNCTION"],
            ["100.0", "%", "25.0", "%", "step", "(step.py)"],
            ["-", "75.0", "%", "wait", "(wait.py)"],
        ]
        threads: Any = json.loads(gzip.decompress(file.read_bytes()))["profiles"]
        assert [each["name"][:6] for each in threads] == ["rank 1", "rank 0"]

    with_job(tmp_path / "state", scenario)


def test_a_rank_without_a_profile_costs_no_other(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str) -> None:
        bench.agents[0].logs = profile({"step": 4})
        bench.agents[1].logs = agents_pb2.RankProfile(problem="no tool").SerializeToString()
        done = await command(bench, job_id, "--rank", "0", "--rank", "1", "--seconds", "1")
        assert done.returncode == ExitCode.OK, done.stderr
        assert done.stdout.splitlines()[0].split() == ["RANK", "0", "FUNCTION"]
        assert f"missing: rank 1 of {job_id} has no profile: no tool" in " ".join(
            done.stderr.split()
        )
        alone = await command(bench, job_id, "--rank", "1", "--seconds", "1")
        assert alone.returncode == ExitCode.JOB_FAILED
        assert "has no profile: no tool" in " ".join(alone.stderr.split())

    with_job(tmp_path / "state", scenario)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rank", "2"], "rank: is 2; allowed: 0 to 1"),
        (["-o", "/no/such/folder/file"], "--output: /no/such/folder/file cannot be written"),
        ([word for rank in range(9) for word in ("--rank", str(rank))], "allowed: up to 8"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_recorded(
    tmp_path: Path, arguments: list[str], why: str
) -> None:
    async def scenario(bench: Lab, job_id: str) -> None:
        done = await command(bench, job_id, *arguments)
        assert done.returncode != ExitCode.OK
        assert why in " ".join(done.stderr.split())
        assert not any(agent.log_queries for agent in bench.agents)

    with_job(tmp_path / "state", scenario)


def test_an_interrupt_ends_the_recording_on_the_node(tmp_path: Path) -> None:
    async def scenario(bench: Lab, job_id: str) -> None:
        agent = bench.agents[0]
        agent.silent_on.add("log_query")
        program = (sys.executable, "-m", "outlast.cli.main", "profile", job_id, "--seconds", "60")
        process = await asyncio.create_subprocess_exec(
            *program, "--controller", bench.running.grpc, stderr=asyncio.subprocess.PIPE
        )
        try:
            await until(lambda: len(agent.log_queries) == 1, "the recording to begin")
            os.kill(process.pid, signal.SIGINT)
            async with asyncio.timeout(TIMEOUT_S):
                await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == ExitCode.INTERRUPTED
        await until(lambda: agent.log_queries[-1].cancel, "it to be ended")

    with_job(tmp_path / "state", scenario)
