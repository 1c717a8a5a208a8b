"""The JSON API: what HTTP says of jobs, ranks, nodes and incidents, and whom it refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from controller.addresses import reachable
from controller.web.pages import SameSite
from controller.web.parameters import MAX_BODY_BYTES
from outlast.v1 import agents_pb2, common_pb2
from tests.controller.fakes import DEADLINE_S, Lab, lab, submit_request
from tests.web.schemas import answer_schema, wrong

SPEC = {"name": "small", "steps": 10, "parallel": {"dp": 1}, "resources": {"workers_per_node": 1}}


@asynccontextmanager
async def site(state_dir: Path) -> AsyncIterator[tuple[Lab, httpx.AsyncClient]]:
    """A controller with two nodes, and who asks it by HTTP."""
    async with lab(state_dir) as bench:
        await bench.add_agents(2)
        base = f"http://{bench.running.http}"
        async with httpx.AsyncClient(base_url=base, timeout=DEADLINE_S) as client:
            yield bench, client


def run(tmp_path: Path, scenario: Callable[[Lab, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with site(tmp_path / "state") as (bench, client):
            await scenario(bench, client)

    asyncio.run(whole())


async def got(client: httpx.AsyncClient, path: str, **query: Any) -> Any:
    """An answer, which is as the OpenAPI document says."""
    answer = await client.get(f"/api/v1{path}", params=query)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert wrong(found, answer_schema(f"/api/v1{path}")) == []
    return found


def test_what_is_there_is_told(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        assert (await got(client, "/about"))["term"] == 1
        jobs = (await got(client, "/jobs"))["jobs"]
        assert [(job["job_id"], job["state"]) for job in jobs] == [(job_id, "RUNNING")]
        assert "spec" not in jobs[0]
        job = (await got(client, f"/jobs/{job_id}"))["job"]
        assert job["nodes"] == ["n0", "n1"]
        assert job["spec"]["name"] == job["name"]
        # Absent, a number of 64 bits, a map, a list.
        assert job["loss"] is None
        assert job["attempt"] == 1
        assert "productive" in job["seconds"]
        assert job["skipped"] == []
        ranks = await got(client, f"/jobs/{job_id}/ranks", first=1)
        assert [rank["node"] for rank in ranks["ranks"]] == ["n1"]
        nodes = await got(client, "/nodes", most=1)
        assert (len(nodes["nodes"]), nodes["num_nodes"]) == (1, 2)
        assert (await got(client, "/incidents", job=job_id, brief="true"))["incidents"] == []
        assert (await got(client, "/diagnostics"))["runs"] == []
        trends = await got(client, f"/jobs/{job_id}/trends")
        assert (trends["speed"], trends["hours"], trends["findings"]) == (None, [], [])
        compared = await got(client, "/node-statistics", days=30, most=1)
        rest = await got(client, "/node-statistics", most=1, after=compared["next"])
        assert [node["node_id"] for node in compared["nodes"] + rest["nodes"]] == ["n0", "n1"]
        assert rest["next"] == ""
        alone = (await got(client, "/node-statistics", node="n1"))["nodes"]
        assert [node["node_id"] for node in alone] == ["n1"]
        assert (await got(client, "/spec-schema"))["properties"]["steps"]

    run(tmp_path, scenario)


def test_jobs_come_in_pages_newest_first(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        ids = [(await bench.jobs.Submit(submit_request(name=name))).job.job_id for name in "abc"]
        first = await got(client, "/jobs", limit=2)
        assert [job["job_id"] for job in first["jobs"]] == [ids[2], ids[1]]
        rest = await got(client, "/jobs", limit=2, after=first["next"])
        assert ([job["job_id"] for job in rest["jobs"]], rest["next"]) == ([ids[0]], None)

    run(tmp_path, scenario)


def test_jobs_and_nodes_are_steered(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        text = "name: small\nsteps: 10\nparallel: {dp: 1}\nresources: {workers_per_node: 1}\n"
        fit = await client.post("/api/v1/jobs/check", json={"text": text})
        assert (fit.status_code, fit.json()["fitting"]) == (200, 2)
        made = await client.post("/api/v1/jobs", json={"spec": SPEC, "request_id": "r"})
        again = await client.post("/api/v1/jobs", json={"spec": SPEC, "request_id": "r"})
        assert made.status_code == 201
        job_id = made.json()["job"]["job_id"]
        assert again.json()["job"]["job_id"] == job_id
        cancelled = await client.post(f"/api/v1/jobs/{job_id}/cancel", json={})
        assert cancelled.status_code == 200
        cordoned = await client.post("/api/v1/nodes/n0/cordon", json={})
        assert cordoned.json()["node"]["cordoned"]
        refused = await client.post(f"/api/v1/jobs/{job_id}/resume", json={})
        assert (refused.status_code, refused.json()["error"]["reason"]) == (409, "JOB_ENDED")

    run(tmp_path, scenario)


def test_a_curve_is_told_whole_and_as_it_grows(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        split = common_pb2.StepSplit(forward_s=0.03, dp_exposed_s=0.02)
        await bench.agents[0].report(5.0, 4.0, 3.0, first_step=2, split=split)
        async with asyncio.timeout(DEADLINE_S):
            while (curve := await got(client, f"/jobs/{job_id}/curve"))["num_steps"] < 3:
                await asyncio.sleep(0.02)
        assert curve["columns"]["step"] == [2, 3, 4]
        assert set(map(len, curve["columns"].values())) == {3}
        # Steps that are reported together have the parts of their last one.
        assert curve["columns"]["forward_s"] == [0.03] * 3
        assert curve["columns"]["dp_exposed_s"] == [0.02] * 3
        await bench.agents[0].report(2.0, first_step=5)
        few = await got(client, f"/jobs/{job_id}/curve", **{"from": 3, "to": 3})
        assert few["columns"]["step"] == [3]
        events = []
        path = f"/api/v1/jobs/{job_id}/events?after_step=3"
        async with asyncio.timeout(DEADLINE_S), client.stream("GET", path) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            async for name, value in read_events(stream):
                events.append((name, value))
                if name == "steps":
                    break
        assert events[0][1]["job_id"] == job_id
        assert events[-1][1][0]["step"] == 4
        assert events[-1][1][0]["split"]["forward_s"] == 0.03
        while (curve := await got(client, f"/jobs/{job_id}/curve"))["num_steps"] < 4:
            await asyncio.sleep(0.02)
        assert curve["columns"]["forward_s"] == [0.03, 0.03, 0.03, None]

    run(tmp_path, scenario)


def test_what_a_job_went_through_is_told(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        agent = bench.agents[0]
        await agent.commit(job_id, 1)
        await agent.commit(job_id, 2)
        await bench.agents[1].exit(1, -9, step=2)
        await bench.started(2)
        await bench.train(3, resumed=2)
        await bench.reach(job_id, "RUNNING")
        history = await got(client, f"/jobs/{job_id}/history")
        spans = history["states"]
        attempts = [each["attempt"] for each in spans if each["state"] == "RUNNING"]
        assert attempts == [1, 2]
        assert "SIGKILL" in next(each["reason"] for each in spans if each["state"] == "SUSPENDING")
        assert [each["until_s"] for each in spans[:-1]] == [each["from_s"] for each in spans[1:]]
        assert spans[-1]["until_s"] is None
        known = [(each["step"], each["is_newest"]) for each in history["checkpoints"]]
        assert known == [(1, False), (2, True)]
        newest = await got(client, f"/jobs/{job_id}/history", most=1)
        assert [each["step"] for each in newest["checkpoints"]] == [2]
        refused = await client.get(f"/api/v1/jobs/{job_id}/history", params={"most": 10**6})
        assert refused.status_code == 400
        assert "allowed: 1 to" in refused.json()["error"]["message"]

    run(tmp_path, scenario)


def test_a_stream_ends_with_its_job_and_with_the_controller(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        made = await client.post("/api/v1/jobs", json={"spec": SPEC})
        job_id = made.json()["job"]["job_id"]
        await client.post(f"/api/v1/jobs/{job_id}/cancel", json={})
        path = f"/api/v1/jobs/{job_id}/events"
        async with asyncio.timeout(DEADLINE_S), client.stream("GET", path) as stream:
            names = [name async for name, _ in read_events(stream)]
        assert names[-1] == "end"
        running = await bench.jobs.Submit(submit_request(name="running"))
        path = f"/api/v1/jobs/{running.job.job_id}/events"
        open_streams.append(await client.send(client.build_request("GET", path), stream=True))

    open_streams: list[httpx.Response] = []
    # `run` ends, though a stream is open.
    run(tmp_path, scenario)
    assert len(open_streams) == 1


def test_logs_are_text(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        bench.agents[0].logs = b"caf\xc3\xa9 \xff\n"
        chunks = (await got(client, f"/jobs/{job_id}/logs", rank=0))["chunks"]
        assert [chunk["text"] for chunk in chunks if chunk["text"]] == ["café \ufffd\n"]
        # A character of which each of two chunks has a part, in both answers.
        bench.agents[0].logs_cut_at = 4
        chunks = (await got(client, f"/jobs/{job_id}/logs", rank=0))["chunks"]
        assert [chunk["text"] for chunk in chunks if chunk["text"]] == ["caf", "é �\n"]
        path = f"/api/v1/jobs/{job_id}/logs/events"
        async with client.stream("GET", path, params={"rank": 0}) as stream:
            events = read_events(stream)
            texts = [(await anext(events))[1]["text"] for _ in range(2)]
        assert texts == ["caf", "é �\n"]
        await got(client, f"/jobs/{job_id}/logs", grep="caf.", attempt="all", since_s=1.5)
        asked = bench.agents[0].log_queries[-1]
        assert (asked.grep, asked.all_attempts, asked.since_s) == ("caf.", True, 1.5)
        # Whole logs are searched.
        assert asked.tail_bytes == 0
        for name, value in (("grep", "("), ("since_s", "x"), ("attempt", "some")):
            answer = await client.get(f"/api/v1/jobs/{job_id}/logs", params={name: value})
            assert (answer.status_code, name in answer.text) == (400, True)

    run(tmp_path, scenario)


def test_stacks_and_a_profile_of_a_rank(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        job_id = await bench.start_job()
        stacks = agents_pb2.RankStacks(rank=1, location="running at step", text="Thread 1")
        bench.agents[1].logs = stacks.SerializeToString()
        (rank,) = (await got(client, f"/jobs/{job_id}/stacks", rank=1))["ranks"]
        assert (rank["node"], rank["location"], rank["text"]) == (
            "n1",
            "running at step",
            "Thread 1",
        )
        thread = {
            "name": 'Thread 1 "MainThread"',
            "samples": [[0, 1], [0]],
            "weights": [0.03, 0.01],
        }
        frames = [{"name": "main", "file": "a.py"}, {"name": "step", "file": "b.py"}]
        document = {"shared": {"frames": frames}, "profiles": [thread]}
        profile = agents_pb2.RankProfile(speedscope=gzip.compress(json.dumps(document).encode()))
        bench.agents[0].logs = profile.SerializeToString()
        found = await got(client, f"/jobs/{job_id}/profile", rank=0, seconds=1)
        assert (found["node"], found["speedscope"]) == ("n0", document)
        assert found["functions"] == [
            {"name": "step", "file": "b.py", "share": 0.75, "beside_share": None},
            {"name": "main", "file": "a.py", "share": 0.25, "beside_share": None},
        ]
        assert found["beside"] is None
        bench.agents[0].logs = agents_pb2.RankProfile(problem="py-spy: no").SerializeToString()
        for query, status, why in (
            ({"rank": 0}, 409, "rank 0 of .* has no profile: py-spy: no"),
            ({"rank": 2}, 400, "rank: is 2; allowed: 0 to 1"),
            ({"seconds": 61}, 400, "seconds"),
        ):
            answer = await client.get(f"/api/v1/jobs/{job_id}/profile", params=query)
            assert answer.status_code == status
            assert re.search(why, answer.json()["error"]["message"] + str(answer.json()))

    run(tmp_path, scenario)


REFUSALS: list[tuple[str, str, object, int, str]] = [
    ("GET", "/jobs/nobody", None, 404, "there is no job 'nobody'"),
    ("GET", "/jobs?limit=0", None, 400, "limit: is '0'; allowed: 1 to 1000"),
    ("GET", "/jobs?limitt=1", None, 400, "limitt: is no parameter; allowed: after, limit"),
    ("GET", "/jobs?after=nobody", None, 400, "after: is 'nobody', which is no job"),
    ("GET", "/nodes?most=x", None, 400, "most: is 'x'; allowed: 0 to 2147483647"),
    ("GET", "/incidents?brief=maybe", None, 400, "brief: is 'maybe'; allowed: true or false"),
    ("GET", "/jobs/nobody/events", None, 404, "there is no job 'nobody'"),
    ("GET", "/jobs/nobody/curve?points=1", None, 400, "points: is '1'; allowed: 2 to 20000"),
    ("GET", "/jobs/nobody/heat-map", None, 404, "there is no job 'nobody'"),
    ("GET", "/jobs/nobody/heat-map?measure=x", None, 400, "measure: is 'x'; allowed: step, work"),
    ("GET", "/jobs/nobody/heat-map?order=x", None, 400, "order: is 'x'; allowed: rank, node, pos"),
    ("GET", "/jobs/nobody/heat-map?steps=1025", None, 400, "steps: is '1025'; allowed: 1 to 1024"),
    ("GET", "/jobs/nobody/heat-map?attempt=-1", None, 400, "attempt: is '-1'; allowed: 0 to"),
    ("GET", "/jobs/nobody/timeline", None, 404, "there is no job 'nobody'"),
    ("GET", "/jobs/nobody/timeline?most=0", None, 400, "most: is '0'; allowed: 1 to 256"),
    ("GET", "/nothing", None, 404, "there is no /api/v1/nothing"),
    ("POST", "/nodes/n0/cordon", {"a": 1}, 400, "a: is no field; allowed: none"),
    ("POST", "/nodes/n0/cordon?a=1", {}, 400, "a: is no parameter; allowed: none"),
    ("POST", "/jobs", {}, 400, "one of spec and text"),
    ("POST", "/jobs", {"spec": 1}, 400, "no mapping of fields to values"),
    ("POST", "/jobs", {"text": "a: [1"}, 400, "not YAML"),
    ("POST", "/jobs", {"spec": SPEC, "request_id": 3}, 400, "body is not as it should be"),
    ("POST", "/jobs", {"spec": {"name": "x" * MAX_BODY_BYTES}}, 413, "more than"),
]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        for verb, path, body, status, says in REFUSALS:
            answer = await client.request(verb, f"/api/v1{path}", json=body)
            assert (answer.status_code, path) == (status, path), answer.text
            assert says in answer.json()["error"]["message"]
            assert wrong(answer.json(), {"$ref": "#/Error"}) == []

    run(tmp_path, scenario)


def test_a_bad_spec_names_its_fields(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        for path in ("/jobs", "/jobs/check"):
            answer = await client.post(f"/api/v1{path}", json={"text": "steps: -1\nmodle: {}"})
            assert answer.status_code == 400
            fields = {each["field"] for each in answer.json()["error"]["fields"]}
            assert fields >= {"steps", "modle"}

    run(tmp_path, scenario)


FOREIGN = [
    ({"Origin": "http://evil.example"}, 403, "CROSS_SITE"),
    ({"Content-Type": "text/plain"}, 415, "NOT_JSON"),
    ({"Host": "evil.example"}, 400, "WRONG_HOST"),
]


def test_other_sites_in_the_same_browser_change_nothing(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        for headers, status, reason in FOREIGN:
            whole = {"Content-Type": "application/json", **headers}
            answer = await client.post("/api/v1/nodes/n0/cordon", content="{}", headers=whole)
            assert (answer.status_code, answer.json()["error"]["reason"]) == (status, reason)
        nodes = (await got(client, "/nodes"))["nodes"]
        assert not any(node["cordoned"] for node in nodes)

    run(tmp_path, scenario)


def test_other_machines_see_metrics_and_probes_only() -> None:
    async def served(request: Request) -> Response:
        return Response("served")

    async def statuses(*, is_open: bool) -> list[int]:
        app = SameSite(Router([Route("/{path:path}", served)]), is_open=is_open)
        # As it comes in by an address of a network.
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.1") as client:
            paths = ("/healthz", "/readyz", "/metrics", "/sd/agents", "/", "/api/v1/jobs")
            return [(await client.get(path)).status_code for path in paths]

    assert asyncio.run(statuses(is_open=False)) == [200, 200, 200, 200, 403, 403]
    assert asyncio.run(statuses(is_open=True)) == [200] * 6


def test_the_page_and_its_files_are_served(tmp_path: Path) -> None:
    async def scenario(bench: Lab, client: httpx.AsyncClient) -> None:
        for path in ("/", "/jobs/some-job", "/nodes"):
            page = await client.get(path)
            assert page.headers["content-type"].startswith("text/html")
            assert "default-src 'self'" in page.headers["content-security-policy"]
        script = await client.get("/page/app.js")
        assert "javascript" in script.headers["content-type"]
        same = await client.get("/page/app.js", headers={"If-None-Match": script.headers["etag"]})
        assert same.status_code in (200, 304)
        for path in ("/page/none.js", "/page/%2e%2e/app.py", "/page/views"):
            assert (await client.get(path)).status_code == 404

    run(tmp_path, scenario)


def test_who_listens_everywhere_is_reached_by_the_loopback() -> None:
    assert reachable("0.0.0.0:1") == "127.0.0.1:1"
    assert reachable("[::]:1") == "[::1]:1"
    assert reachable("10.0.0.1:1") == "10.0.0.1:1"


async def read_events(stream: httpx.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in stream.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))
