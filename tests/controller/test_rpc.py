"""What clients get: idempotence, complete errors, logs, diagnostics, steering."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from controller.core.edge import reports
from controller.rpc.views import document_of, struct_of
from outlast.v1 import agents_pb2, diagnostics_pb2, jobs_pb2, nodes_pb2
from outlast.v1.agents_pb2_grpc import AgentsStub
from outlast.v1.diagnostics_pb2_grpc import DiagnosticsStub
from outlast.v1.nodes_pb2_grpc import NodesStub
from tests.controller.fakes import Lab, lab, submit_request, until


def test_submit_is_idempotent_by_request_id(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            answers = await asyncio.gather(
                *(bench.jobs.Submit(submit_request("r1")) for _ in range(5))
            )
            assert len({answer.job.job_id for answer in answers}) == 1
            job = answers[0].job
            assert job.state == "QUEUED"
            assert job.name == "tiny"
            assert document_of(job.spec)["steps"] == 10  # type: ignore[index]
            error = await failure(bench.jobs.Submit(submit_request("r1", steps=11)))
            assert error.code() is grpc.StatusCode.ALREADY_EXISTS
            other = await bench.jobs.Submit(submit_request("r2", name="other"))
            assert other.job.job_id != job.job_id
            listed = (await bench.jobs.ListJobs(jobs_pb2.ListJobsRequest())).jobs
            assert [found.job_id for found in listed] == [job.job_id, other.job.job_id]

    asyncio.run(scenario())


def test_a_script_is_taken_with_its_size_and_no_end_that_is_known(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            spec = jobs_pb2.SubmitRequest().spec
            workload = {"command": ["python", "train.py"], "workers_per_node": 4}
            spec.update({"name": "mine", "workload": workload, "resources": {"nodes": 3}})
            fit = await bench.jobs.CheckFit(jobs_pb2.CheckFitRequest(spec=spec))
            assert fit.needed == 3
            job = (await bench.jobs.Submit(jobs_pb2.SubmitRequest(spec=spec))).job
            assert (job.ranks, job.total_steps) == (12, 0)

    asyncio.run(scenario())


def test_of_jobs_submitted_at_once_under_one_name_one_is_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            calls = [bench.jobs.Submit(submit_request(f"r{number}")) for number in range(5)]
            answers = await asyncio.gather(*calls, return_exceptions=True)
            (made,) = [each for each in answers if isinstance(each, jobs_pb2.SubmitResponse)]
            refused = [each for each in answers if isinstance(each, grpc.aio.AioRpcError)]
            assert len(refused) == 4
            assert reasons(refused[0]) == ["JOB_NAME_TAKEN"]
            assert made.job.job_id in (refused[0].details() or "")
            assert made.job.checkpoint_url.endswith(f"/{made.job.job_id}")
            cancel = jobs_pb2.CancelJobRequest(job_id=made.job.job_id)
            assert (await bench.jobs.CancelJob(cancel)).job.state == "CANCELLED"
            reused = await bench.jobs.Submit(submit_request("r9"))
            assert reused.job.job_id != made.job.job_id

    asyncio.run(scenario())


def test_logs_of_an_attempt_that_never_was_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            made = await bench.jobs.Submit(submit_request("r1"))
            error = await failure(logs(bench, made.job.job_id, attempt=3))
            assert violations(error) == ["attempt"]

    asyncio.run(scenario())


def test_bad_spec_answers_every_field_problem(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            spec = jobs_pb2.SubmitRequest().spec
            spec.update({"name": "Bad Name", "steps": 0, "modell": {}, "data": {"source": ""}})
            error = await failure(bench.jobs.Submit(jobs_pb2.SubmitRequest(spec=spec)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert sorted(violations(error)) == ["data.source", "modell", "name", "steps"]
            for url in ("checkpoints", "./x", "s4://bucket/x"):
                request = submit_request()
                request.spec.update({"checkpoint": {"url": url}})
                error = await failure(bench.jobs.Submit(request))
                assert violations(error) == ["checkpoint.url"]
            for number in (math.inf, -math.inf, math.nan):
                request = submit_request()
                request.spec.update({"optimizer": {"lr": number}})
                error = await failure(bench.jobs.Submit(request))
                assert violations(error) == ["optimizer.lr"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        (None, "file://{state_dir}/checkpoints/"),
        ("/mnt/ckpt/", "file:///mnt/ckpt/"),
        ("s3://bucket/ckpt", "s3://bucket/ckpt/"),
    ],
)
def test_checkpoint_url_ends_with_the_job_id(
    tmp_path: Path, given: str | None, begins: str
) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            request = submit_request(checkpoint={"url": given})
            job_id = (await bench.jobs.Submit(request)).job.job_id
            await bench.started(1)
            url = bench.agents[0].last("start_workers").start_workers.checkpoint_url
            assert url == begins.format(state_dir=tmp_path) + job_id

    asyncio.run(scenario())


def test_unknown_things_are_not_found_with_a_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            nodes = NodesStub(bench.channel)
            for call, reason in (
                (bench.jobs.GetJob(jobs_pb2.GetJobRequest(job_id="x")), "JOB_NOT_FOUND"),
                (bench.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id="x")), "JOB_NOT_FOUND"),
                (nodes.DrainNode(nodes_pb2.DrainNodeRequest(node_id="x")), "NODE_NOT_FOUND"),
            ):
                error = await failure(call)
                assert error.code() is grpc.StatusCode.NOT_FOUND
                assert reasons(error) == [reason]
            watch = bench.jobs.WatchJob(jobs_pb2.WatchJobRequest(job_id="x"))
            error = await failure(anext(aiter(watch)))
            assert error.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


def test_pause_resume_and_cancel(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            error = await failure(bench.jobs.ResumeJob(jobs_pb2.ResumeJobRequest(job_id=job_id)))
            assert reasons(error) == ["JOB_NOT_PAUSED"]
            await bench.jobs.PauseJob(jobs_pb2.PauseJobRequest(job_id=job_id))
            await bench.reach(job_id, "PAUSED")
            assert bench.agents[0].last("stop_workers").stop_workers.graceful
            await bench.jobs.ResumeJob(jobs_pb2.ResumeJobRequest(job_id=job_id))
            await bench.started(2)
            await bench.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job_id))
            job = await bench.reach(job_id, "CANCELLED")
            assert job.finished_s > 0
            again = await bench.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job_id))
            assert again.job.state == "CANCELLED"
            error = await failure(bench.jobs.PauseJob(jobs_pb2.PauseJobRequest(job_id=job_id)))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert reasons(error) == ["JOB_ENDED"]

    asyncio.run(scenario())


def test_cordon_drain_and_uncordon(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(1)
            nodes = NodesStub(bench.channel)
            cordoned = await nodes.CordonNode(nodes_pb2.CordonNodeRequest(node_id="n0"))
            assert cordoned.node.cordoned
            drained = await nodes.DrainNode(nodes_pb2.DrainNodeRequest(node_id="n0"))
            assert drained.node.state == "DRAINED"
            back = await nodes.UncordonNode(nodes_pb2.UncordonNodeRequest(node_id="n0"))
            assert (back.node.state, back.node.cordoned) == ("READY", False)
            assert back.node.connected
            assert back.node.last_heartbeat_s > 0

    asyncio.run(scenario())


def test_logs_come_from_the_nodes_of_the_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            for agent in bench.agents:
                agent.logs = f"hello from {agent.node}".encode()
            job_id = (await bench.jobs.Submit(submit_request())).job.job_id
            await bench.started(1)
            chunks = await logs(bench, job_id)
            assert sorted((c.node, c.rank, c.data) for c in chunks) == [
                ("n0", 0, b"hello from n0"),
                ("n1", 1, b"hello from n1"),
            ]
            (chunk,) = await logs(bench, job_id, rank=1)
            assert chunk.node == "n1"
            error = await failure(logs(bench, job_id, rank=2))
            assert violations(error) == ["rank"]
            follower = asyncio.create_task(logs(bench, job_id, follow=True))
            await until(lambda: not follower.done(), "the follower follows")
            await bench.jobs.CancelJob(jobs_pb2.CancelJobRequest(job_id=job_id))
            assert len(await follower) == 2

    asyncio.run(scenario())


def test_what_is_asked_for_of_logs_goes_to_the_nodes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            await logs(bench, job_id, grep="na+n", since_s=5.0, all_attempts=True)
            for agent in bench.agents:
                (query,) = agent.log_queries
                assert (query.grep, query.since_s, query.all_attempts) == ("na+n", 5.0, True)
            wrong: list[tuple[str, dict[str, object]]] = [
                ("grep", {"grep": "("}),
                ("since_s", {"since_s": -1.0}),
                ("since_s", {"since_s": float("nan")}),
                ("all_attempts", {"all_attempts": True, "attempt": 1}),
            ]
            for field, fields in wrong:
                error = await failure(logs(bench, job_id, **fields))
                assert violations(error) == [field]

    asyncio.run(scenario())


def test_diagnostics_stream_findings_and_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            stub = DiagnosticsStub(bench.channel)
            error = await failure(
                stub.RunDiagnostics(diagnostics_pb2.RunDiagnosticsRequest(suite="preflight"))
            )
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            await bench.add_agents(2)
            error = await failure(
                stub.RunDiagnostics(diagnostics_pb2.RunDiagnosticsRequest(suite="nonsense"))
            )
            assert violations(error) == ["suite"]
            run = await stub.RunDiagnostics(diagnostics_pb2.RunDiagnosticsRequest())
            assert sorted(run.nodes) == ["n0", "n1"]
            findings = []
            request = diagnostics_pb2.WatchDiagnosticsRequest(run_id=run.run_id)
            async for update in stub.WatchDiagnostics(request):
                findings += update.findings
                last = update
            assert sorted((f.node, f.verdict) for f in findings) == [
                ("n0", "pass"),
                ("n1", "pass"),
            ]
            assert last.run.state == "done"
            assert [(link.node, link.peer, link.verdict) for link in last.run.links] == [
                ("n0", "n1", "pass")
            ]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        (agents_pb2.Hello(node_id="../x", incarnation="i", workers=1), "hello.node_id"),
        (agents_pb2.Hello(node_id="n0", workers=1), "hello.incarnation"),
        (agents_pb2.Hello(node_id="n0", incarnation="i"), "hello.workers"),
    ],
)
def test_hello_that_makes_no_sense_is_refused(
    tmp_path: Path, hello: agents_pb2.Hello, field: str
) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            call = AgentsStub(bench.channel).Session()
            await call.write(agents_pb2.AgentMessage(hello=hello))
            assert violations(await failure(call.read())) == [field]

    asyncio.run(scenario())


def test_an_event_that_cannot_be_taken_in_holds_up_none_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = reports.worker_exited
    exits = ["well", "well", "mistaken"]

    def mistaken(*facts: object) -> object:
        if exits.pop() == "mistaken":
            raise ZeroDivisionError("our own mistake")
        return real(*facts)  # type: ignore[arg-type]

    monkeypatch.setattr("controller.core.edge.reports.worker_exited", mistaken)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            (agent,) = await bench.add_agents(1)
            await bench.start_job(parallel={"dp": 1})
            present = agent.running[0]
            await agent.exit(0, -9)
            # The session ends, and the node comes back with all that is true on it.
            await until(lambda: agent.num_sessions == 2, "it is back")
            agent.running[0] = present
            seq = await agent.exit(0, -9)
            await until(lambda: agent.acked_seq >= seq, "later events are acknowledged")
            assert agent.num_sessions == 2

    asyncio.run(scenario())


def test_health_and_reflection_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            health = health_pb2_grpc.HealthStub(bench.channel)
            for name in ("", "outlast.v1.Jobs"):
                status = await health.Check(health_pb2.HealthCheckRequest(service=name))
                assert status.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(bench.channel)
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            async for answer in reflection.ServerReflectionInfo(iter([asked])):
                names = [service.name for service in answer.list_services_response.service]
            assert {"outlast.v1.Jobs", "outlast.v1.Agents"} <= set(names)

    asyncio.run(scenario())


def test_numbers_of_a_spec_survive_the_struct() -> None:
    document = document_of(
        struct_of('{"a": 1, "b": 0.5, "c": [true, null], "d": 9007199254740993}')
    )
    assert document == {"a": 1, "b": 0.5, "c": [True, None], "d": "9007199254740993"}


async def logs(bench: Lab, job_id: str, **fields: object) -> list[jobs_pb2.LogsResponse]:
    request = jobs_pb2.LogsRequest(job_id=job_id, **fields)  # type: ignore[arg-type]
    return [chunk async for chunk in bench.jobs.Logs(request)]


async def failure(call: object) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return caught.value


def violations(error: grpc.aio.AioRpcError) -> list[str]:
    found = []
    for detail in rpc_status.from_call(error).details:  # type: ignore[arg-type, union-attr]
        request = error_details_pb2.BadRequest()
        if detail.Unpack(request):
            found += [violation.field for violation in request.field_violations]
    return found


def reasons(error: grpc.aio.AioRpcError) -> list[str]:
    found = []
    for detail in rpc_status.from_call(error).details:  # type: ignore[arg-type, union-attr]
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            found.append(info.reason)
    return found
