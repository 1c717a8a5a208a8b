"""The JSON API of nodes, incidents and diagnostics: pages, histories, and checks from afar."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from outlast.client import Client
from outlast.v1 import nodes_pb2
from outlast.v1.nodes_pb2_grpc import NodesStub
from tests.controller.fakes import DEADLINE_S, Lab
from tests.web.test_api import got, read_events, run


async def all_pages(client: httpx.AsyncClient, path: str, name: str, **query: Any) -> list[Any]:
    """What the answers of all pages have under a name."""
    pages, after = [], ""
    while True:
        answer = await got(client, path, **query, **({"after": after} if after else {}))
        pages.append(answer[name])
        if not (after := answer["next"]):
            return pages


def test_nodes_come_in_pages_those_that_need_attention_first(tmp_path: Any) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        await bench.add_agents(3)
        drained = await client.post("/api/v1/nodes/n3/drain", json={})
        assert drained.status_code == 200
        pages = await all_pages(client, "/nodes", "nodes", most=2)
        names = [[node["node_id"] for node in page] for page in pages]
        assert names == [["n3", "n0"], ["n1", "n2"], ["n4"]]
        whole = await got(client, "/nodes")
        assert (whole["next"], whole["num_nodes"]) == ("", 5)
        assert whole["states"] == {"READY": 4, "DRAINED": 1}
        only = await got(client, "/nodes", state="DRAINED")
        assert [node["node_id"] for node in only["nodes"]] == ["n3"]
        wrong = await client.get("/api/v1/nodes?state=LOST")
        assert wrong.json()["error"]["fields"][0]["field"] == "state"
        # As gRPC had it before there were pages.
        old = await NodesStub(bench.channel).ListNodes(nodes_pb2.ListNodesRequest())
        assert [node.node_id for node in old.nodes] == [f"n{each}" for each in range(5)]

    run(tmp_path, scenario)


def test_a_node_has_the_changes_of_its_state(tmp_path: Any) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        await client.post("/api/v1/nodes/n1/cordon", json={})
        await client.post("/api/v1/nodes/n1/uncordon", json={})
        await client.post("/api/v1/nodes/n1/drain", json={})
        found = await got(client, "/nodes/n1")
        assert found["node"]["state"] == "DRAINED"
        changes = [(each["state"], each["cordoned"]) for each in found["changes"]]
        assert changes[:3] == [("READY", False), ("READY", True), ("READY", False)]
        assert changes[-1] == ("DRAINED", True)
        missing = await client.get("/api/v1/nodes/nobody")
        assert missing.status_code == 404

    run(tmp_path, scenario)


def test_incidents_come_in_pages_and_of_one_node(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        for turn in range(3):
            await bench.agents[1].exit(1, -9, step=turn + 1)
            await bench.started(turn + 2)
            await bench.train(turn + 2)
            await bench.reach(job_id, "RUNNING")
        pages = await all_pages(client, "/incidents", "incidents", newest=2, brief="true")
        ids = [[each["incident_id"] for each in page] for page in pages]
        assert ids == [[f"{job_id}.i2", f"{job_id}.i3"], [f"{job_id}.i1"]]
        of_node = await got(client, "/incidents", node="n1")
        assert len(of_node["incidents"]) == 3
        assert (await got(client, "/incidents", node="n0"))["incidents"] == []
        wrong = await client.get("/api/v1/incidents?after=nobody")
        assert "is 'nobody', which is no incident" in wrong.text
        monkeypatch.setattr("outlast.paging.PAGE", 2)
        listed, newest = await asyncio.to_thread(asked, bench.running.grpc)
        assert listed == [f"{job_id}.i{number}" for number in (1, 2, 3)]
        assert newest == [f"{job_id}.i3"]

    def asked(address: str) -> tuple[list[str], list[str]]:
        with Client(address) as client:
            whole = [each.incident_id for each in client.incidents()]
            return whole, [each.incident_id for each in client.incidents(newest=1)]

    run(tmp_path, scenario)


def test_a_node_is_checked_and_its_runs_are_listed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        await bench.add_agents(1)
        bench.agents[2].verdicts["preflight"] = "fail"
        runs = []
        for nodes in (["n0", "n2"], ["n1"], ["n2"]):
            begun = await client.post("/api/v1/diagnostics", json={"nodes": nodes})
            runs.append(begun.json()["run_id"])
            path = f"/api/v1/diagnostics/{runs[-1]}/events"
            async with asyncio.timeout(DEADLINE_S), client.stream("GET", path) as stream:
                events = [event async for event in read_events(stream)]
            assert [name for name, _ in events][-2:] == ["progress", "end"]
            verdicts = {
                each["node"]: each["verdict"] for each in events[-2][1]["run"]["node_reports"]
            }
            assert verdicts.get("n2", "fail") == "fail"
        pages = await all_pages(client, "/diagnostics", "runs", newest=2)
        assert [[each["run_id"] for each in page] for page in pages] == [
            [runs[2], runs[1]],
            [runs[0]],
        ]
        own = await got(client, "/diagnostics", node="n2")
        assert [each["run_id"] for each in own["runs"]] == [runs[2], runs[0]]
        found = (await got(client, f"/diagnostics/{runs[0]}", node="n2"))["run"]["findings"]
        assert found
        assert all("n2" in (each["node"], each["peer"]) for each in found)
        assert len(found) < len((await got(client, f"/diagnostics/{runs[0]}"))["run"]["findings"])
        unknown = await client.get("/api/v1/diagnostics/nobody/events")
        assert unknown.status_code == 404
        monkeypatch.setattr("outlast.paging.PAGE", 2)
        listed = await asyncio.to_thread(asked, bench.running.grpc)
        assert listed == (runs[::-1], ["n0", "n1", "n2"])

    def asked(address: str) -> tuple[list[str], list[str]]:
        with Client(address) as client:
            nodes = [each.node_id for each in client.nodes()]
            return [each.run_id for each in client.diagnostic_runs()], nodes

    run(tmp_path, scenario)
