"""What each rank of a job does: from heartbeats to whoever asks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from controller.core.incident_record import Evidence, IncidentRecord
from controller.core.kinds import EvidenceKind
from controller.core.states import IncidentState
from controller.rpc.ranks import newest_faults
from outlast.ids import Attempt, IncidentId, JobId, NodeId
from outlast.v1 import agents_pb2, common_pb2, ranks_pb2
from outlast.v1.ranks_pb2_grpc import RanksStub
from tests.controller.fakes import DEADLINE_S, Lab, lab


def summary(job_id: str, rank: int, *, attempt: int = 1) -> agents_pb2.RankSummary:
    return agents_pb2.RankSummary(
        job_id=job_id,
        attempt=attempt,
        rank=rank,
        phase="backward",
        completed_step=7,
        last_operation=agents_pb2.Operation(
            op="all_reduce", group="dp", sequence=40, detail=-1, is_inside=True
        ),
        last_op_age_s=1.5,
        stalled_s=1.5,
        stall_limit_s=3.0,
        entered={"dp": 40},
        process_state="S",
        use=agents_pb2.RankUse(
            split=common_pb2.StepSplit(forward_s=0.2), peak_memory_bytes=1000 + rank
        ),
    )


async def ranks(bench: Lab, job_id: str, first: int = 0, most: int = 0) -> list[ranks_pb2.Rank]:
    request = ranks_pb2.ListRanksRequest(job_id=job_id, first=first, most=most)
    return list((await RanksStub(bench.channel).ListRanks(request)).ranks)


def test_every_rank_is_listed_with_what_was_heard_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, second = await bench.add_agents(2)
            job_id = await bench.start_job()
            # What is told of an older attempt says nothing of this one.
            await first.heartbeat(summary(job_id, 0, attempt=0))
            await second.heartbeat(summary(job_id, 1))
            async with asyncio.timeout(DEADLINE_S):
                while not (found := await ranks(bench, job_id))[1].phase:
                    await asyncio.sleep(0.02)
            assert [(each.rank, each.node, each.dp) for each in found] == [
                (0, "n0", 0),
                (1, "n1", 1),
            ]
            assert (found[0].phase, found[0].completed_step) == ("", -1)
            assert not found[0].HasField("last_operation")
            heard = found[1]
            assert (heard.completed_step, heard.stalled_s, heard.stall_limit_s) == (7, 1.5, 3.0)
            assert heard.last_operation.op == "all_reduce"
            assert heard.last_operation.is_inside
            assert heard.last_operation.age_s == 1.5
            assert dict(heard.entered) == {"dp": 40}
            assert heard.split.forward_s == pytest.approx(0.2)
            assert heard.peak_memory_bytes == 1001
            assert [each.rank for each in await ranks(bench, job_id, first=1, most=1)] == [1]

    asyncio.run(scenario())


def test_a_send_or_receive_names_the_rank_at_its_other_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job(parallel={"pp": 2, "dp": 1, "micro_batch": 1})
            for rank, peer in ((0, 1), (1, 7)):
                heard = summary(job_id, rank)
                heard.last_operation.op, heard.last_operation.group = "recv", "pp"
                heard.last_operation.peer = peer
                await bench.agents[rank].heartbeat(heard)
            async with asyncio.timeout(DEADLINE_S):
                found = await ranks(bench, job_id)
                while not all(each.phase for each in found):
                    await asyncio.sleep(0.02)
                    found = await ranks(bench, job_id)
            assert found[0].last_operation.peer == 1
            # There is no such stage.
            assert not found[1].last_operation.HasField("peer")

    asyncio.run(scenario())


def test_the_newest_fault_of_a_rank_is_the_one_that_is_shown() -> None:
    first = incident("a.i1", evidence(1, 5.0, "killed"), evidence(None, 9.0, "node lost"))
    second = incident("a.i2", evidence(1, 7.0, "stands still"), evidence(0, 6.0, "exit 1"))
    found = newest_faults([first, second])
    shown = {rank: (one.incident, sign.detail) for rank, (one, sign) in found.items()}
    assert shown == {1: ("a.i2", "stands still"), 0: ("a.i2", "exit 1")}


def evidence(rank: int | None, at_s: float, detail: str) -> Evidence:
    return Evidence(
        kind=EvidenceKind.WORKER_EXIT, node=NodeId("n0"), rank=rank, detail=detail, at_s=at_s
    )


def incident(name: str, *signs: Evidence) -> IncidentRecord:
    return IncidentRecord(
        incident=IncidentId(name),
        job=JobId("a"),
        attempt=Attempt(1),
        state=IncidentState.OPEN,
        opened_s=0.0,
        fault_s=0.0,
        fault_step=1,
        evidence=signs,
    )


REFUSALS = [
    (2, 0, "first: is 2; allowed: 0 to 1"),
    (-1, 0, "first: is -1; allowed: 0 to 1"),
    (0, 5000, "most: is 5000; allowed: 1 to 4096, or 0"),
]


def test_ranks_that_are_not_there_are_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            for first, most, says in REFUSALS:
                with pytest.raises(grpc.aio.AioRpcError, match=says):
                    await ranks(bench, job_id, first, most)
            with pytest.raises(grpc.aio.AioRpcError, match="there is no job 'other'"):
                await ranks(bench, "other")

    asyncio.run(scenario())


def test_times_come_from_the_agents_of_a_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, second = await bench.add_agents(2)
            job_id = await bench.start_job()
            times = ranks_pb2.RankTimes(steps=[ranks_pb2.TimedStep(step=3, start_ns=1, end_ns=2)])
            first.logs = times.SerializeToString()
            # What an agent sends that does not know of times.
            second.logs = b"\xff some output"
            stub = RanksStub(bench.channel)
            request = ranks_pb2.ReadTimesRequest(job_id=job_id)
            found = {each.node: each async for each in stub.ReadTimes(request)}
            assert found["n0"].times == times
            assert "does not tell times" in found["n1"].missing.reason
            for wrong, says in (
                ({"rank": 2}, "allowed: 0 to 1"),
                ({"attempt": 7}, "1 to 1"),
                ({"measure": "none"}, "measure: is 'none'; allowed: step, work"),
                ({"most_steps": 1025}, "most_steps: is 1025; allowed: 1 to 1024, or 0"),
            ):
                bad = ranks_pb2.ReadTimesRequest(job_id=job_id, **wrong)
                with pytest.raises(grpc.aio.AioRpcError, match=says):
                    await stub.ReadTimes(bad).read()

    asyncio.run(scenario())


def test_stacks_come_from_the_agents_of_a_job(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, second = await bench.add_agents(2)
            job_id = await bench.start_job()
            stacks = agents_pb2.RankStacks(rank=0, location="running at step", text="Thread 1")
            first.logs = stacks.SerializeToString()
            # What an agent sends that does not know of stacks.
            second.logs = b"\xff some output"
            stub = RanksStub(bench.channel)
            request = ranks_pb2.ReadStacksRequest(job_id=job_id)
            found = {each.node: each async for each in stub.ReadStacks(request)}
            assert (found["n0"].location, found["n0"].text) == ("running at step", "Thread 1")
            assert "does not send stacks" in found["n1"].missing.reason
            bad = ranks_pb2.ReadStacksRequest(job_id=job_id, rank=2)
            with pytest.raises(grpc.aio.AioRpcError, match="rank: is 2; allowed: 0 to 1"):
                await stub.ReadStacks(bad).read()

    asyncio.run(scenario())


def test_a_profile_is_sent_or_why_there_is_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            first, second = await bench.add_agents(2)
            job_id = await bench.start_job()
            first.logs = agents_pb2.RankProfile(speedscope=b"gzipped").SerializeToString()
            second.logs = agents_pb2.RankProfile(problem="py-spy: no").SerializeToString()
            stub = RanksStub(bench.channel)

            async def record(**changes: Any) -> ranks_pb2.RecordProfileResponse:
                usual = {"job_id": job_id, "rank": 0, "seconds": 2, "rate": 100}
                request = ranks_pb2.RecordProfileRequest(**{**usual, **changes})
                return await stub.RecordProfile(request)

            found = await record()
            assert (found.node, found.speedscope) == ("n0", b"gzipped")
            for changes, why in (
                ({"rank": 1}, "rank 1 of .* has no profile: py-spy: no"),
                ({"rank": 2}, "rank: is 2; allowed: 0 to 1"),
                ({"seconds": 0}, "seconds: is 0; allowed: 1 to 60"),
                ({"rate": 251}, "rate: is 251; allowed: 1 to 250"),
                ({"job_id": "other"}, "outlast jobs"),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match=why):
                    await record(**changes)
            second.logs = b"\xff some output"
            with pytest.raises(grpc.aio.AioRpcError, match="does not record profiles"):
                await record(rank=1)

    asyncio.run(scenario())
