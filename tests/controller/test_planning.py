"""What a submit of a large job costs, and that the event loop does not pay for it."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import grpc.aio
import pytest

from checkpoint.replicas import placing
from controller.convert import plan_of
from controller.core.records import JobPlan
from controller.rpc import planning
from outlast.spec import JobSpec
from outlast.spec.parse import parse_spec
from outlast.v1 import jobs_pb2
from tests.controller.fakes import lab, submit_request


def _elastic(dp: int, pp: int) -> JobSpec:
    """A job with copies of host memory that may shrink to any number of replicas that works."""
    return parse_spec(
        {
            "name": "elastic",
            "model": {"layers": 4},
            "parallel": {"tp": 2, "pp": pp, "dp": dp, "zero": {"level": 1}},
            "data": {"global_batch": dp},
            "resources": {"workers_per_node": 2},
            "checkpoint": {"replicas": 1},
            "recovery": {"elastic": {"min_dp": 1}},
        }
    )


def _lines_run(spec: JobSpec) -> int:
    """Lines of Python that a plan takes, each iteration of a loop among them."""
    num_lines = 0

    def counting(_frame: FrameType, what: str, _argument: object) -> Any:
        nonlocal num_lines
        num_lines += what == "line"
        return counting

    before = sys.gettrace()
    sys.settrace(counting)
    try:
        plan_of(spec)
    finally:
        sys.settrace(before)
    return num_lines


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_the_work_of_a_plan_grows_with_the_ranks_and_not_with_their_square(pp: int) -> None:
    """With two stages there are nodes in a rank's groups at every distance: the choice among all
    distances compared each with each node."""
    lines, four_times = _lines_run(_elastic(64, pp)), _lines_run(_elastic(256, pp))
    assert 0 < four_times < 5 * lines


def test_copies_are_placed_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = []
    place = placing.place_replicas

    def counting(*args: Any, **options: Any) -> Any:
        placed.append(args)
        return place(*args, **options)

    monkeypatch.setattr(placing, "place_replicas", counting)
    plan = plan_of(_elastic(16, 2))
    assert [size.dp for size in plan.sizes] == [16, 8, 4, 2, 1]
    assert len(placed) == len(plan.sizes)


def test_a_job_is_planned_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noting(spec: JobSpec) -> JobPlan:
        threads.append(threading.get_ident())
        return plan_of(spec)

    monkeypatch.setattr(planning, "plan_of", noting)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            request = submit_request("r1")
            job = (await bench.jobs.Submit(request)).job
            assert job.state == "QUEUED"
            # The same request again has a job already, and needs no plan.
            assert (await bench.jobs.Submit(request)).job.job_id == job.job_id
            await bench.jobs.CheckFit(jobs_pb2.CheckFitRequest(spec=request.spec))
            assert len(threads) == 2
            assert threading.get_ident() not in threads

    asyncio.run(scenario())


def test_a_plan_that_takes_too_long_ends_the_call_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def waiting(spec: JobSpec) -> JobPlan:
        goes_on.wait(60.0)
        return plan_of(spec)

    monkeypatch.setattr(planning, "plan_of", waiting)
    monkeypatch.setattr(planning, "PLAN_S", 0.05)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            try:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await bench.jobs.Submit(submit_request("r1"))
            finally:
                goes_on.set()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "plan took longer than 0.05 s" in (caught.value.details() or "")
            assert (await bench.jobs.ListJobs(jobs_pb2.ListJobsRequest())).jobs == []

    asyncio.run(scenario())
