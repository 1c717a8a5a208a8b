"""Answers that are made of more than one call are as the OpenAPI document says.

`got` holds each of them to its schema; here are those that have all that a schema knows of, and
what a schema that is strict finds wrong with them.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from outlast.v1 import agents_pb2, common_pb2, ranks_pb2
from tests.controller.fakes import DEADLINE_S, Lab
from tests.web.schemas import answer_schema, wrong
from tests.web.test_api import got, run
from tests.web.test_profiles import profile_of

MS = 1_000_000
# What is in it is of the format of another program.
FREE = ("speedscope",)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """All in an answer whose keys its schema knows."""
    if isinstance(value, dict):
        yield value
        for name, each in value.items():
            yield from () if name in FREE else objects(each)
    elif isinstance(value, list):
        for each in value:
            yield from objects(each)


def is_held(path: str, answer: Any) -> None:
    """No key of the answer could be another, be left out, or come in."""
    schema = answer_schema(f"/api/v1{path}")
    assert wrong(answer, schema) == []
    changed = copy.deepcopy(answer)
    for each in objects(changed):
        each["besides"] = 1
        assert any("besides is unknown" in problem for problem in wrong(changed, schema))
        del each["besides"]
        for name in [*each]:
            value = each.pop(name)
            missing = [f"{name} is missing" in problem for problem in wrong(changed, schema)]
            assert any(missing) != name.startswith("eval/")
            each[name] = {"of": "no kind"}
            assert name in FREE or wrong(changed, schema)
            each[name] = value
    assert wrong(changed, schema) == []


def test_a_curve_with_held_out_sets_is_as_its_schema_says(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        now_s = time.time()
        whole = common_pb2.StepReport(
            step=2,
            attempt=1,
            loss=3.0,
            grad_norm=1.0,
            tokens=100,
            duration_s=0.1,
            at_s=now_s,
            eval_loss=2.5,
            eval_losses={"books": 2.0, "web": 3.0},
            split=common_pb2.StepSplit(forward_s=0.03),
        )
        # Its batch was left out.
        bare = common_pb2.StepReport(step=3, attempt=1, loss=float("nan"), at_s=now_s)
        reports = agents_pb2.StepReports(reports=[whole, bare])
        await bench.agents[0].send(
            agents_pb2.AgentEvent(job_id=job_id, attempt=1, step_reports=reports)
        )
        path = f"/jobs/{job_id}/curve"
        is_held(path, await got(client, path, **{"from": 9}))
        async with asyncio.timeout(DEADLINE_S):
            while (curve := await got(client, path))["num_steps"] < 2:
                await asyncio.sleep(0.02)
        assert curve["columns"]["eval/web/loss"] == [3.0, None]
        assert curve["columns"]["loss"] == [3.0, None]
        is_held(path, curve)

    run(tmp_path, scenario)


def test_a_heat_map_is_as_its_schema_says(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        path = f"/jobs/{job_id}/heat-map"
        for agent, seconds in zip(bench.agents, ([0.2, 0.2, 0.2], [0.2, 0.5]), strict=True):
            steps = range(3, 3 + len(seconds))
            measured = ranks_pb2.MeasuredSteps(steps=steps, seconds=seconds)
            agent.logs = ranks_pb2.RankTimes(measured=measured).SerializeToString()
        found = await got(client, path, measure="work")
        assert [row["seconds"] for row in found["rows"]] == [[0.2, 0.2, 0.2], [0.2, 0.5, None]]
        assert [row["outliers"] for row in found["rows"]] == [[], [[1, 1]]]
        is_held(path, found)
        # A row of several ranks, and a node that says nothing of use.
        is_held(path, await got(client, path, measure="work", rows=1))
        bench.agents[0].logs = bench.agents[1].logs = b"\xff"
        nothing = await got(client, path, measure="work")
        assert (nothing["rows"], len(nothing["missing"])) == ([], 2)
        is_held(path, nothing)
        # Ranks that have not done a step yet.
        empty = ranks_pb2.RankTimes(measured=ranks_pb2.MeasuredSteps()).SerializeToString()
        bench.agents[0].logs = bench.agents[1].logs = empty
        is_held(path, await got(client, path, measure="work"))

    run(tmp_path, scenario)


def stage_times(op: str, start_ms: int, end_ms: int, departed_ms: int = 0) -> bytes:
    """Of a stage of a pipeline with two: a pass, and a message to or from the other one."""
    operation = ranks_pb2.TimedOperation(
        op=op,
        group="pp",
        detail=0,
        start_ns=start_ms * MS,
        end_ns=end_ms * MS,
        departed_ns=departed_ms * MS,
        peer=1 if op == "send" else 0,
        message=7,
    )
    span = ranks_pb2.TimedSpan(
        phase="forward_backward", work="forward", start_ns=MS, end_ns=9 * MS, waited_ns=MS
    )
    step = ranks_pb2.TimedStep(step=3, start_ns=MS, end_ns=10 * MS)
    collective = ranks_pb2.TimedOperation(
        op="barrier", group="world", detail=-1, start_ns=9 * MS, end_ns=10 * MS
    )
    found = ranks_pb2.RankTimes(
        operations=[operation, collective], spans=[span], steps=[step], known_since_ns=MS
    )
    return found.SerializeToString()


def test_a_timeline_of_a_pipeline_is_as_its_schema_says(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job(parallel={"dp": 1, "pp": 2})
        path = f"/jobs/{job_id}/timeline"
        bench.agents[0].logs = stage_times("send", 5, 6, departed_ms=3)
        bench.agents[1].logs = stage_times("recv", 2, 5)
        found = await got(client, path, step=3)
        assert [track["pp"] for track in found["tracks"]] == [0, 1]
        bars = [bar for track in found["tracks"] for bar in track["bars"]]
        for name in ("peer", "message", "departed_s", "last"):
            kinds = {bar[name] is None for bar in bars}
            assert (name, kinds) == (name, {True, False})
        is_held(path, found)
        bench.agents[1].logs = b"\xff"
        without = await got(client, path, step=3)
        assert (len(without["tracks"]), len(without["missing"])) == (1, 1)
        is_held(path, without)
        # A job that has done no step as yet.
        bench.agents[0].logs = b"\xff"
        is_held(path, await got(client, path))

    run(tmp_path, scenario)


def test_a_profile_is_as_its_schema_says(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        path = f"/jobs/{job_id}/profile"
        bench.agents[0].logs, bench.agents[1].logs = profile_of(1.0, 3.0), profile_of(3.0, 1.0)
        is_held(path, await got(client, path, rank=0, seconds=1))
        is_held(path, await got(client, path, rank=0, seconds=1, beside=1))
        problem = agents_pb2.RankProfile(problem="py-spy: no").SerializeToString()
        bench.agents[1].logs = problem
        is_held(path, await got(client, path, rank=0, seconds=1, beside=1))

    run(tmp_path, scenario)
