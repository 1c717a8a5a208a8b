"""The plan of a job over HTTP: what `outlast plan` says, before anything is submitted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from controller.planner import PlanJob
from controller.web.own_routes import PLAN
from outlast.cli.plan_document import plan_document
from tests.controller.fakes import DEADLINE_S, lab
from tests.web.schemas import wrong

SPEC: dict[str, Any] = {
    "name": "large",
    "steps": 10,
    "precision": "bf16",
    "model": {"layers": 8, "hidden": 256, "heads": 4, "seq_len": 128},
    "parallel": {"tp": 2, "pp": 4, "dp": 2},
    "data": {"global_batch": 4},
    "resources": {"workers_per_node": 8},
}


def run(
    tmp_path: Path,
    scenario: Callable[[httpx.AsyncClient], Awaitable[None]],
    plan_job: PlanJob | None = plan_document,
) -> None:
    async def whole() -> None:
        async with lab(tmp_path, plan_job=plan_job) as bench:
            base = f"http://{bench.running.http}/api/v1"
            async with httpx.AsyncClient(base_url=base, timeout=DEADLINE_S) as client:
                await scenario(client)

    asyncio.run(whole())


def test_a_plan_has_memory_traffic_time_and_warnings(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post("/jobs/plan", json={"spec": SPEC, "device": "h100"})
        assert answer.status_code == 200, answer.text
        body = answer.json()
        plan = body["plan"]
        assert wrong(plan, PLAN) == []
        assert (plan["num_ranks"], plan["nodes"], len(plan["stages"])) == (16, 2, 4)
        assert all(stage["device_bytes"] > stage["weights_bytes"] for stage in plan["stages"])
        traffic = plan["communication"]
        assert traffic["total_bytes"] >= traffic["tp_bytes"] > 0
        assert plan["projection"]["step_s"] > plan["projection"]["compute_s"] > 0
        assert "micro-batches do not fill 4 stages" in plan["warnings"][0]
        assert "h100" in body["devices"]
        without = await client.post("/jobs/plan", json={"spec": SPEC})
        assert without.json()["plan"]["projection"] is None
        slower = {"spec": SPEC, "device": "h100", "link": "1GB/s", "kernels": 0.35}
        slow = (await client.post("/jobs/plan", json=slower)).json()["plan"]["projection"]
        assert slow["step_s"] > plan["projection"]["step_s"]
        late = {"spec": SPEC, "device": "h100", "latency_us": 500}
        late_plan = (await client.post("/jobs/plan", json=late)).json()["plan"]["projection"]
        assert late_plan["latency_s"] == 500e-6
        assert late_plan["step_s"] > plan["projection"]["step_s"]

    run(tmp_path, scenario)


def test_what_a_script_needs_is_not_known(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        text = "name: own\nworkload: {command: [python, own.py]}\nresources: {nodes: 1}\n"
        found = (await client.post("/jobs/plan", json={"text": text})).json()
        assert (found["plan"], found["reason"][:20]) == (None, "what a script needs ")

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": "pocket"}, "device"),
        ({"device": 3}, "device"),
        ({"device": "h100", "link": "fast"}, "link"),
        ({"kernels": 2}, "kernels"),
        ({"latency_us": -1}, "latency_us"),
        ({"latency_us": True}, "latency_us"),
        ({"spec": {**SPEC, "steps": -1}}, "steps"),
        ({"where": 1}, "where"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_field(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post("/jobs/plan", json={"spec": SPEC, **changes})
        assert answer.status_code == 400
        assert answer.json()["error"]["fields"][0]["field"] == field

    run(tmp_path, scenario)


def test_a_controller_without_the_arithmetic_says_so(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post("/jobs/plan", json={"spec": SPEC})
        assert (answer.status_code, answer.json()["error"]["reason"]) == (501, "NO_PLANS")

    run(tmp_path, scenario, plan_job=None)
