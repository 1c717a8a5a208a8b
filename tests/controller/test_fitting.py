"""Whether a job fits is said before anything starts, field by field."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from controller.convert import plan_of
from controller.core.capacity import Capacity
from controller.core.records import NodeRecord
from controller.core.settings import Settings
from controller.core.states import NodeState
from controller.rpc.fitting import Fit, fit_of
from outlast.ids import NodeId
from outlast.spec.parse import parse_spec
from outlast.v1 import common_pb2, jobs_pb2
from tests.controller.fakes import lab, submit_request
from tests.controller.test_rpc import failure, violations

GIB = 1 << 30
SMALL = Capacity(cpus=2, memory_bytes=24 * GIB, host_memory_bytes=12 * GIB)
LARGE = Capacity(gpus=8, memory_bytes=1024 * GIB, host_memory_bytes=512 * GIB)
BIG_MODEL = {"layers": 32, "hidden": 4096, "heads": 32}


def node(name: str, capacity: Capacity | None, *, workers: int = 2) -> NodeRecord:
    return NodeRecord(
        node=NodeId(name),
        state=NodeState.READY,
        since_s=0.0,
        reason="joined",
        incarnation="one",
        address=name,
        rendezvous_port=1,
        workers=workers,
        capacity=capacity,
    )


def fit(*nodes: NodeRecord, **changes: object) -> Fit:
    parallel = {"parallel": {"dp": 4}, "resources": {"workers_per_node": 2}}
    spec = parse_spec({"name": "job", "data": {"global_batch": 16}, **parallel, **changes})
    return fit_of(spec, plan_of(spec), nodes, "", None)


def test_a_job_that_fits_has_no_problems() -> None:
    found = fit(node("n1", SMALL), node("n2", LARGE))
    assert (found.connected, found.fitting, found.needed, found.problems) == (2, 2, 2, ())


def test_too_few_nodes_are_no_problem_of_the_spec() -> None:
    found = fit(node("n1", SMALL))
    assert (found.fitting, found.needed, found.problems) == (1, 2, ())
    assert fit().problems == ()


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (
            {"resources": {"workers_per_node": 4}},
            "resources.workers_per_node",
            "is 4; the largest of 2 connected node(s) has 2 worker places",
        ),
        (
            {"resources": {"workers_per_node": 2, "device": "cuda"}},
            "resources.device",
            "none has a GPU; allowed: cpu, auto",
        ),
        ({"model": BIG_MODEL}, "model", "the largest of 2 connected node(s) holds 12.0 GiB"),
    ],
    ids=["worker places", "GPUs", "host memory"],
)
def test_what_no_node_has_is_a_problem_of_the_field_that_asks_for_it(
    changes: dict[str, object], field: str, words: str
) -> None:
    (problem,) = fit(node("n1", SMALL), node("n2", SMALL), **changes).problems
    assert problem.field == field
    assert words in problem.message


def test_all_that_is_missing_is_said_at_once() -> None:
    found = fit(
        node("n1", SMALL), model=BIG_MODEL, resources={"workers_per_node": 4, "device": "cuda"}
    )
    assert [problem.field for problem in found.problems] == [
        "resources.workers_per_node",
        "resources.device",
        "model",
    ]


def test_a_node_that_does_not_say_what_it_has_may_fit() -> None:
    resources = {"workers_per_node": 2, "device": "cuda"}
    found = fit(node("n1", None), node("n2", SMALL), resources=resources)
    assert (found.fitting, found.problems) == (1, ())


def test_submit_refuses_what_no_connected_node_has_unless_told_to_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path, Settings()) as bench:
            gpu_job = {"resources": {"device": "cuda", "workers_per_node": 1}}
            # Nobody is there to be asked.
            await bench.jobs.Submit(submit_request("r0", **gpu_job))
            (agent,) = await bench.add_agents(1)
            agent.capacity = common_pb2.NodeCapacity(cpus=2, host_memory_bytes=12 * GIB)
            await agent.rejoin()
            error = await failure(bench.jobs.Submit(submit_request("r1", name="second", **gpu_job)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert violations(error) == ["resources.device"]
            asked = jobs_pb2.CheckFitRequest(spec=submit_request(**gpu_job).spec)
            found = await bench.jobs.CheckFit(asked)
            assert (found.connected, found.fitting) == (1, 0)
            assert "0 GPUs" in found.nodes
            assert [each.field for each in found.problems] == ["resources.device"]

            request = submit_request("r2", name="third", **gpu_job)
            request.wait_for_nodes = True
            job = (await bench.jobs.Submit(request)).job
            assert job.state == "QUEUED"
            assert "none fit" in job.reason

    asyncio.run(scenario())


def test_an_image_that_no_node_runs_in_is_named() -> None:
    workload = {"command": ["python", "/train.py"], "image": "torch:1"}
    spec = parse_spec({"name": "job", "workload": workload})
    others = node("n1", SMALL)
    found = fit_of(spec, plan_of(spec), [others], "", None)
    (problem,) = found.problems
    assert problem.field == "workload.image"
    assert "is 'torch:1', which none of 1 connected node(s) runs in" in problem.message
    there = node("n2", replace(SMALL, image="torch:1"))
    assert not fit_of(spec, plan_of(spec), [others, there], "", None).problems
