"""`outlast trace` against a controller whose agents say what a test has them say."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as trace_pb2

from outlast.cli.errors import ExitCode
from outlast.v1 import ranks_pb2
from tests.cli.running import Done, outlast
from tests.controller.fakes import Lab, lab, until

MS = 1_000_000


def times(*, began_ms: int) -> bytes:
    """Two steps of a rank; in each a collective, begun so late."""
    found = ranks_pb2.RankTimes(known_since_ns=MS)
    for step in (7, 8):
        begun = (step - 6) * 100 * MS
        found.steps.add(step=step, start_ns=begun, end_ns=begun + 100 * MS)
        found.operations.add(
            op="all_reduce",
            group="dp",
            sequence=step,
            detail=-1,
            start_ns=begun + began_ms * MS,
            end_ns=begun + 50 * MS,
        )
    return found.SerializeToString()


def traced(folder: Path, *arguments: str, check: Callable[[Done], None]) -> None:
    """Of a job of two ranks on two nodes, of which the second begins later."""

    async def scenario() -> None:
        async with lab(folder / "state") as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            check(await command(bench, job_id, *arguments))

    asyncio.run(scenario())


async def command(bench: Lab, *arguments: str) -> Done:
    for agent, began_ms in zip(bench.agents, (10, 30), strict=True):
        agent.logs = times(began_ms=began_ms)
    where = ("--controller", bench.running.grpc)
    return await asyncio.to_thread(outlast, "trace", *arguments, *where)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz", "t", "t.pftrace", "t.pftrace.gz"])
def test_the_name_of_the_file_says_its_format(tmp_path: Path, name: str) -> None:
    def check(done: Done) -> None:
        assert done.returncode == ExitCode.OK, done.stderr
        assert f"{tmp_path / name}: 2 ranks, steps 7-8" in "".join(done.stderr.splitlines())

    traced(tmp_path, "-o", str(tmp_path / name), check=check)
    whole = (tmp_path / name).read_bytes()
    if name.endswith(".gz"):
        whole = gzip.decompress(whole)
    if ".pftrace" in name:
        trace = trace_pb2.Trace.FromString(whole)
        begun = trace_pb2.TrackEvent.TYPE_SLICE_BEGIN
        num_slices = sum(each.track_event.type == begun for each in trace.packet)
        flows = {flow for each in trace.packet for flow in each.track_event.flow_ids}
    else:
        events: list[Any] = json.loads(whole)["traceEvents"]
        num_slices = sum(event["ph"] == "X" for event in events)
        flows = {event["bind_id"] for event in events if "bind_id" in event}
    # Of each rank two steps, two collectives, and its own work before and behind them.
    assert num_slices == 2 * (2 + 2 + 4)
    assert len(flows) == 2


def test_only_the_wanted_steps_are_written(tmp_path: Path) -> None:
    def check(done: Done) -> None:
        assert done.returncode == ExitCode.OK, done.stderr

    traced(tmp_path, "--steps", "8", "--ranks", "0-1", "-o", str(tmp_path / "t.json"), check=check)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["name"].startswith("step ")} == {"step 8"}
    assert [event["args"]["sequence"] for event in events if event["name"] == "all_reduce"] == [
        8,
        8,
    ]


def test_each_checkpoint_of_its_steps_is_a_mark(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path / "state") as bench:
            first, _ = await bench.add_agents(2)
            job_id = await bench.start_job()
            for step in (5, 7, 8):
                await first.commit(job_id, step)
            await until(lambda: first.acked_seq == first.sent_seq, "commits are durable")
            done = await command(bench, job_id, "-o", str(tmp_path / "t.json"))
            assert done.returncode == ExitCode.OK, done.stderr

    asyncio.run(scenario())
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    # The trace has steps 7 and 8, long before the agent says so.
    assert [event["name"] for event in events if event["ph"] == "i"] == [
        "checkpoint of step 7 committed",
        "checkpoint of step 8 committed",
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-o", "/no/such/t.json"], "--output: /no/such/t.json cannot be written: No such file"),
        (["--steps", "many"], "--steps is 'many'; allowed: a step, or two with a hyphen"),
        (["--steps", "9-8"], "--steps is '9-8'; the first step has to come first"),
        (["--ranks", "1,x"], "--ranks is '1,x'; allowed: ranks and runs of them, as 0-7,16"),
        (["--ranks", "3-1"], "--ranks is '3-1'; allowed: ranks and runs of them, as 0-7,16"),
        (["--ranks", "0-8"], "--ranks is '0-8'; allowed: ranks 0 to 1"),
        (["--ranks", "0,1-2"], "--ranks is '0,1-2'; allowed: ranks 0 to 1"),
        (["--rank", "1", "--rank", "2"], "--rank is 2; allowed: ranks 0 to 1"),
        (["--since", "soon"], "--since is 'soon'; allowed: "),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, arguments: list[str], why: str) -> None:
    def check(done: Done) -> None:
        assert done.returncode != ExitCode.OK
        assert why in " ".join(done.stderr.split())

    traced(tmp_path, *arguments, check=check)
