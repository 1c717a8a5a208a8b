"""`outlast logs` against a controller whose agents say what a test has them say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from outlast.cli.errors import ExitCode
from tests.cli.running import Done, outlast
from tests.controller.access.logins import end_login
from tests.controller.fakes import Lab, lab

Logs = Callable[..., Awaitable[Done]]


def with_job(folder: Path, scenario: Callable[[Lab, Logs], Awaitable[None]]) -> None:
    async def run() -> None:
        async with lab(folder / "state") as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            bench.agents[0].logs = b"one\ntwo\n"

            async def logs(*arguments: str) -> Done:
                where = ("--controller", bench.running.grpc)
                return await asyncio.to_thread(outlast, "logs", job_id, *arguments, *where)

            await scenario(bench, logs)

    asyncio.run(run())


def test_each_line_is_told_with_whose_it_is(tmp_path: Path) -> None:
    async def scenario(bench: Lab, logs: Logs) -> None:
        assert (await logs()).stdout.splitlines() == ["[rank 0] one", "[rank 0] two"]
        shown = await logs("--attempt", "all", "--grep", "o", "--since", "10m")
        assert shown.stdout.splitlines()[0] == "[attempt 1 n0 rank 0] one"
        query = bench.agents[0].log_queries[-1]
        assert (query.grep, query.all_attempts, query.since_s > 0.0) == ("o", True, True)
        lines = [json.loads(line) for line in (await logs("--json")).stdout.splitlines()]
        assert bench.agents[0].log_queries[-1].timestamps
        assert [line["line"] for line in lines] == ["one", "two"]
        assert set(lines[0]) == {"time", "job_id", "attempt", "node", "rank", "line"}

    with_job(tmp_path, scenario)


def test_a_login_that_ends_is_said_and_no_output_is_left_out_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_login(monkeypatch, "Logs", answers=0)

    async def scenario(bench: Lab, logs: Logs) -> None:
        done = await logs("--follow")
        assert done.returncode == ExitCode.BAD_INPUT
        assert "his login is over" in done.stderr

    with_job(tmp_path, scenario)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--grep", "("), "--grep is '(': unclosed group; allowed: a regular expression"),
        (("--since", "soon"), "--since is 'soon'; allowed: a length of time"),
        (("--since", "2999-01-01"), "which lies ahead"),
    ],
)
def test_what_cannot_be_searched_is_said_before_anything_is_asked(
    arguments: tuple[str, ...], why: str
) -> None:
    done = outlast("logs", "job", *arguments)
    assert done.returncode == ExitCode.BAD_INPUT
    assert why in " ".join(done.stderr.split())
    assert "Usage: outlast logs" in done.stderr
