"""Callers of a controller that asks for tokens: by gRPC and by HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from controller.access import gate, tokens
from controller.access.audit import Audit
from controller.access.gate import AS_HEADER
from controller.access.roles import RULES, Role
from controller.core.settings import Settings
from controller.kube.training_job import OWNER
from controller.web.login import COOKIE
from outlast.channel import HEADER, bearer
from outlast.v1 import access_pb2, jobs_pb2, nodes_pb2, ranks_pb2
from outlast.v1.access_pb2_grpc import AccessStub
from outlast.v1.nodes_pb2_grpc import NodesStub
from outlast.v1.ranks_pb2_grpc import RanksStub
from tests.controller.access.certificates import ROLES, tokens_file
from tests.controller.fakes import Lab, lab, submit_request

Scenario = Callable[[Lab, dict[str, str]], Awaitable[None]]


def run(tmp_path: Path, scenario: Scenario) -> None:
    path = tmp_path / "tokens.yaml"
    given = tokens_file(path)

    async def whole() -> None:
        async with lab(tmp_path / "state", tokens_file=path) as bench:
            await scenario(bench, given)

    asyncio.run(whole())


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """How a call was refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def read_all(stream: Any) -> None:
    """Until it ends."""
    async for _ in stream:
        pass


def forget(path: Path, name: str) -> None:
    """Take somebody's token away."""
    kept = tuple(each for each in tokens.read(path).entries if each.name != name)
    tokens.write(path, tokens.Known(entries=kept))


def shown(token: str) -> tuple[tuple[str, str], ...]:
    return ((HEADER, bearer(token)),)


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ((), "nobody is named; log in"),
        (((HEADER, "Bearer outlast_wrong"),), "the token is not known, or has expired"),
        (((HEADER, "Basic YTph"),), "the token is not known"),
    ],
)
def test_who_is_nobody_can_call_nothing_but_health(
    tmp_path: Path, metadata: tuple[tuple[str, str], ...], why: str
) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        for method, rule in RULES.items():
            if rule.role is None:
                continue
            call = bench.channel.unary_unary(method)
            code, said = await refused(call(b"", metadata=metadata, timeout=10))
            assert code is grpc.StatusCode.UNAUTHENTICATED, method
            assert why in said
        health = bench.channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await health(b"", metadata=metadata, timeout=10) == b"\x08\x01"

    run(tmp_path, scenario)


def test_each_role_is_refused_what_takes_a_higher_one(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        for name, role in ROLES.items():
            for method, rule in RULES.items():
                if rule.role is None or rule.role <= role:
                    continue
                call = bench.channel.unary_unary(method)
                code, said = await refused(call(b"", metadata=shown(given[name]), timeout=10))
                assert code is grpc.StatusCode.PERMISSION_DENIED, (name, method)
                assert f"{name} is {role.word}; this takes {rule.role.word}" in said

    run(tmp_path, scenario)


def test_each_knows_who_he_is_and_a_token_that_is_taken_away_is_refused_at_once(
    tmp_path: Path,
) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        stub = AccessStub(bench.channel)
        asked = access_pb2.WhoAmIRequest()
        for name in given:
            me = await stub.WhoAmI(asked, metadata=shown(given[name]))
            expected = ROLES.get(name, Role.ADMIN).word
            assert (me.name, me.role, me.asked) == (name, expected, True)
        forget(tmp_path / "tokens.yaml", "vera")
        code, _ = await refused(stub.WhoAmI(asked, metadata=shown(given["vera"])))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert (await stub.WhoAmI(asked, metadata=shown(given["sam"]))).name == "sam"

    run(tmp_path, scenario)


def test_an_open_stream_ends_when_its_callers_token_is_taken_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "AGAIN_S", 0.0)

    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        await bench.add_agents(1)
        made = await bench.jobs.Submit(submit_request(), metadata=shown(given["sam"]))
        asked = jobs_pb2.WatchJobRequest(job_id=made.job.job_id)
        watches = {
            name: aiter(bench.jobs.WatchJob(asked, metadata=shown(given[name]), timeout=30))
            for name in ("vera", "sam")
        }
        for watch in watches.values():
            assert (await anext(watch)).HasField("job")
        forget(tmp_path / "tokens.yaml", "vera")
        await bench.jobs.CancelJob(
            jobs_pb2.CancelJobRequest(job_id=made.job.job_id), metadata=shown(given["sam"])
        )
        code, said = await refused(read_all(watches["vera"]))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "his login is over" in said
        await read_all(watches["sam"])
        entries = Audit(tmp_path / "state").read()
        refusal = next(each for each in entries if each.outcome == "UNAUTHENTICATED")
        found = (refusal.caller, refusal.call, refusal.about)
        assert found == ("vera", "Jobs/WatchJob", made.job.job_id)
        again = bench.jobs.WatchJob(asked, metadata=shown(given["vera"]), timeout=30)
        assert "the token is not known" in (await refused(read_all(again)))[1]

    run(tmp_path, scenario)


def test_a_job_is_its_owners_and_an_operators(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        await bench.add_agents(1)
        made = await bench.jobs.Submit(submit_request(), metadata=shown(given["sam"]))
        assert made.job.owner == "sam"
        job = made.job.job_id
        for call, request in (
            (bench.jobs.PauseJob, jobs_pb2.PauseJobRequest(job_id=job)),
            (bench.jobs.CancelJob, jobs_pb2.CancelJobRequest(job_id=job)),
            (bench.jobs.ResumeJob, jobs_pb2.ResumeJobRequest(job_id=job)),
        ):
            code, said = await refused(call(request, metadata=shown(given["kim"])))
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "this job is of sam, and kim is submitter" in said
        seen = await bench.jobs.GetJob(
            jobs_pb2.GetJobRequest(job_id=job), metadata=shown(given["vera"])
        )
        assert seen.job.owner == "sam"
        # What is not there is said as ever.
        missing = jobs_pb2.CancelJobRequest(job_id="none")
        code, _ = await refused(bench.jobs.CancelJob(missing, metadata=shown(given["kim"])))
        assert code is grpc.StatusCode.NOT_FOUND
        pause = jobs_pb2.PauseJobRequest(job_id=job)
        await bench.jobs.PauseJob(pause, metadata=shown(given["sam"]))
        cancel = jobs_pb2.CancelJobRequest(job_id=job)
        await bench.jobs.CancelJob(cancel, metadata=shown(given["olga"]))

    run(tmp_path, scenario)


def test_a_request_id_is_its_callers_own(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        await bench.add_agents(2)
        of = {}
        for name in ("sam", "kim"):
            asked = submit_request(name=f"of-{name}")
            asked.request_id = "same"
            for _ in range(2):
                made = await bench.jobs.Submit(asked, metadata=shown(given[name]))
                assert of.setdefault(name, made.job.job_id) == made.job.job_id
        assert of["sam"] != of["kim"]

    run(tmp_path, scenario)


def test_what_was_changed_or_refused_is_written_down(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        await bench.add_agents(1)
        nodes = NodesStub(bench.channel)
        made = await bench.jobs.Submit(submit_request(), metadata=shown(given["sam"]))
        await bench.jobs.ListJobs(jobs_pb2.ListJobsRequest(), metadata=shown(given["vera"]))
        cordon = nodes_pb2.CordonNodeRequest(node_id="n0")
        await refused(nodes.CordonNode(cordon, metadata=shown(given["sam"])))
        await nodes.CordonNode(cordon, metadata=shown(given["olga"]))
        gone = nodes_pb2.CordonNodeRequest(node_id="n9")
        await refused(nodes.CordonNode(gone, metadata=shown(given["olga"])))
        await refused(nodes.CordonNode(cordon))
        found = await AccessStub(bench.channel).ReadAudit(
            access_pb2.ReadAuditRequest(), metadata=shown(given["adam"])
        )
        told = [(each.caller, each.call, each.about, each.outcome) for each in found.entries]
        assert told == [
            ("", "Nodes/CordonNode", "", "UNAUTHENTICATED"),
            ("olga", "Nodes/CordonNode", "n9", "NOT_FOUND"),
            ("olga", "Nodes/CordonNode", "n0", "OK"),
            ("sam", "Nodes/CordonNode", "n0", "PERMISSION_DENIED"),
            ("sam", "Jobs/Submit", made.job.job_id, "OK"),
        ]
        assert all(each.peer.startswith("ipv4:127.0.0.1:") for each in found.entries)
        assert found.entries[3].why == "sam is submitter; this takes operator"
        ours = await AccessStub(bench.channel).ReadAudit(
            access_pb2.ReadAuditRequest(caller="olga", most=1), metadata=shown(given["adam"])
        )
        assert [each.about for each in ours.entries] == ["n9"]

    run(tmp_path, scenario)


def test_without_tokens_calls_are_written_down_as_nobodys(tmp_path: Path) -> None:
    async def whole() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(1)
            made = await bench.jobs.Submit(submit_request())
            assert made.job.owner == ""
            (entry,) = Audit(tmp_path).read()
            assert (entry.caller, entry.call, entry.outcome) == ("", "Jobs/Submit", "OK")
            me = await AccessStub(bench.channel).WhoAmI(access_pb2.WhoAmIRequest())
            assert (me.name, me.role, me.asked) == ("", "admin", False)

    asyncio.run(whole())


def test_the_api_takes_a_token_in_the_header_or_in_the_cookie_of_a_login(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        base = f"http://{bench.running.http}"
        async with httpx.AsyncClient(base_url=base) as client:
            for path in ("/api/v1/about", "/api/v1/jobs", "/api/v1/openapi.json"):
                answer = await client.get(path)
                assert answer.status_code == 401
                assert answer.json()["error"]["reason"] == "TOKEN_MISSING"
                wrong = await client.get(path, headers={HEADER: bearer("outlast_x")})
                assert wrong.json()["error"]["reason"] == "TOKEN_WRONG"
                right = await client.get(path, headers={HEADER: bearer(given["vera"])})
                assert right.status_code == 200
            for path in ("/healthz", "/metrics", "/", "/page/app.js"):
                assert (await client.get(path)).status_code == 200
            refused = await client.post("/api/v1/login", json={"token": "outlast_x"})
            assert refused.status_code == 401
            done = await client.post("/api/v1/login", json={"token": given["olga"]})
            assert done.json() == {"name": "olga", "role": "operator", "asked": True}
            cookie = done.headers["set-cookie"].lower()
            assert "httponly" in cookie
            assert "samesite=strict" in cookie
            assert (await client.get("/api/v1/whoami")).json()["name"] == "olga"
            left = await client.post("/api/v1/logout", json={})
            assert left.status_code == 200
            assert COOKIE not in client.cookies
            assert (await client.get("/api/v1/whoami")).status_code == 401

    run(tmp_path, scenario)


def test_roles_and_the_log_hold_for_http_with_where_it_came_from(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        await bench.add_agents(1)
        base = f"http://{bench.running.http}"
        async with httpx.AsyncClient(base_url=base) as client:
            path = "/api/v1/nodes/n0/cordon"
            for name, status in (("vera", 403), ("sam", 403), ("olga", 200)):
                asked = {HEADER: bearer(given[name])}
                answer = await client.post(path, json={}, headers=asked)
                assert answer.status_code == status, answer.text
            asked = {HEADER: bearer(given["adam"])}
            found = (await client.get("/api/v1/audit?most=3", headers=asked)).json()["entries"]
        assert [each["caller"] for each in found] == ["olga", "sam", "vera"]
        assert all(each["peer"].startswith("http:127.0.0.1:") for each in found)

    run(tmp_path, scenario)


def test_nobody_names_his_own_address(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        claimed = (*shown(given["vera"]), ("outlast-from", "http:10.0.0.1:1"))
        cordon = nodes_pb2.CordonNodeRequest(node_id="n0")
        await refused(NodesStub(bench.channel).CordonNode(cordon, metadata=claimed))
        (entry,) = Audit(tmp_path / "state").read()
        assert entry.peer.startswith("ipv4:127.0.0.1:")

    run(tmp_path, scenario)


def test_agents_show_the_join_token_beside_callers_with_tokens(tmp_path: Path) -> None:
    join = tmp_path / "join"
    join.write_text("0123456789abcdef\n")

    async def whole() -> None:
        path = tmp_path / "tokens.yaml"
        given = tokens_file(path)
        async with lab(tmp_path / "state", tokens_file=path, join_token_file=join) as bench:
            # A caller's token lets nobody in as a node.
            call = bench.channel.stream_stream("/outlast.v1.Agents/Session")
            session = call(metadata=shown(given["adam"]))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await session.read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            (entry,) = Audit(tmp_path / "state").read()
            assert (entry.call, entry.why) == ("Agents/Session", "the join token is wrong")

    asyncio.run(whole())


def test_where_somebody_asks_from_is_not_his_to_say(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        claimed = {HEADER: bearer(given["vera"]), "X-Forwarded-For": "6.6.6.6"}
        async with httpx.AsyncClient(base_url=f"http://{bench.running.http}") as client:
            await client.post("/api/v1/nodes/n0/cordon", json={}, headers=claimed)
        (entry,) = Audit(tmp_path / "state").read()
        assert entry.peer.startswith("http:127.0.0.1:")

    run(tmp_path, scenario)


@pytest.mark.parametrize("others", ['prefs={"a": 1}; ', "x; ", "a=b; ", "="])
def test_cookies_of_other_servers_on_this_host_do_no_harm(tmp_path: Path, others: str) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        shown = {"Cookie": f"{others};{COOKIE}={given['vera']}"}
        async with httpx.AsyncClient(base_url=f"http://{bench.running.http}") as client:
            answer = await client.get("/api/v1/whoami", headers=shown)
            assert answer.json()["name"] == "vera"
            done = await client.post("/api/v1/login", json={"token": given["vera"]})
            assert "path=/api/v1" in done.headers["set-cookie"].lower()

    run(tmp_path, scenario)


def test_logins_that_fail_are_written_down_whatever_they_show(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        async with httpx.AsyncClient(base_url=f"http://{bench.running.http}") as client:
            headers = {"Content-Type": "application/json"}
            for body in (b'{"token": "outlast_x"}', b'{"token": "\\ud800"}'):
                answer = await client.post("/api/v1/login", content=body, headers=headers)
                assert answer.status_code == 401
        found = [(each.call, each.outcome) for each in Audit(tmp_path / "state").read()]
        assert found == [("POST /api/v1/login", "UNAUTHENTICATED")] * 2

    run(tmp_path, scenario)


def test_looking_into_processes_takes_their_owner_and_is_written_down(tmp_path: Path) -> None:
    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        await bench.add_agents(1)
        made = await bench.jobs.Submit(submit_request(), metadata=shown(given["sam"]))
        ranks = RanksStub(bench.channel)
        asked = ranks_pb2.ReadStacksRequest(job_id=made.job.job_id, native=True)
        for name in ("vera", "kim"):
            code, _ = await refused(ranks.ReadStacks(asked, metadata=shown(given[name])).read())
            assert code is grpc.StatusCode.PERMISSION_DENIED
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in ranks.ReadStacks(asked, metadata=shown(given["sam"]), timeout=5):
                pass
        callers = [each.caller for each in Audit(tmp_path / "state").read()]
        assert callers == ["sam", "kim", "vera", "sam"]

    run(tmp_path, scenario)


def test_a_job_that_its_owner_may_never_have_the_nodes_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    given = tokens_file(path)
    settings = Settings(quotas=(("sam", 1),))

    async def whole() -> None:
        async with lab(tmp_path / "state", settings, tokens_file=path) as bench:
            await bench.add_agents(2)
            asked = submit_request()
            code, said = await refused(bench.jobs.Submit(asked, metadata=shown(given["sam"])))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "parallel: takes 2 node(s)" in said
            assert "sam may have 1 at a time (queue.owners" in said
            asked.wait_for_nodes = True
            waits = await bench.jobs.Submit(asked, metadata=shown(given["sam"]))
            assert waits.job.state == "QUEUED"
            listed = await bench.jobs.ListJobs(
                jobs_pb2.ListJobsRequest(), metadata=shown(given["vera"])
            )
            assert [job.queue_position for job in listed.jobs] == [1]
            other = submit_request(name="kims")
            await bench.jobs.Submit(other, metadata=shown(given["kim"]))

    asyncio.run(whole())


def test_a_submitter_gives_no_higher_priority_than_he_may(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    given = tokens_file(path)

    async def whole() -> None:
        settings = Settings(most_priority=5)
        async with lab(tmp_path / "state", settings, tokens_file=path) as bench:
            await bench.add_agents(2)
            high = submit_request(queue={"priority": 6})
            code, said = await refused(bench.jobs.Submit(high, metadata=shown(given["sam"])))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "queue.priority: is 6; sam is submitter and may give up to 5" in said
            made = await bench.jobs.Submit(high, metadata=shown(given["olga"]))
            assert made.job.priority == 6

    asyncio.run(whole())


def test_nobody_calls_on_behalf_of_others_without_the_secret_of_the_process(
    tmp_path: Path,
) -> None:
    """Through its own socket, which another process of its user reaches as well."""

    async def scenario(bench: Lab, given: dict[str, str]) -> None:
        own = f"unix:{tmp_path / 'state' / 'grpc.socket'}"
        for address in (own, bench.running.grpc):
            async with grpc.aio.insecure_channel(address) as channel:
                for said in (OWNER, f" {OWNER}", f"guess {OWNER}"):
                    call = AccessStub(channel).WhoAmI(
                        access_pb2.WhoAmIRequest(), metadata=((AS_HEADER, said),), timeout=10
                    )
                    code, _ = await refused(call)
                    assert code is grpc.StatusCode.UNAUTHENTICATED

    run(tmp_path, scenario)
