"""What looking at a large fleet costs the controller: its page for Prometheus, and messages."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import Metric

from bench.bare_controller import Bench, Turns, controller
from bench.controller.fleet import JOB, WORKERS, answer, beat, first_steps, join, submit
from controller.clock import SteadyClock
from controller.sessions.incoming import Incoming
from controller.web.metrics import ControllerMetrics
from controller.web.metrics.sources import Sources
from outlast.ids import NodeId
from outlast.v1 import agents_pb2, jobs_pb2, ranks_pb2

SCRAPED_RANKS, ASKED_RANKS = 10_000, 100_000
_ROUNDS = 7


async def measure(folder: Path, *, small: bool) -> dict[str, Any]:
    """A page with a job of 10,000 ranks; messages about one of 100,000."""
    scraped, asked = (80, 160) if small else (SCRAPED_RANKS, ASKED_RANKS)
    rounds = 1 if small else _ROUNDS
    page = await _scrape(folder / "scraped", scraped // WORKERS, rounds)
    messages = await _messages(folder / "asked", asked // WORKERS, rounds)
    return {
        "scrape": {"ranks": scraped, **page},
        "messages": {"ranks": asked, "asked": messages},
    }


async def train(bench: Bench, num_nodes: int) -> None:
    """A job on all nodes, of which every rank was heard."""
    await join(bench, num_nodes)
    await submit(bench, num_nodes)
    await answer(bench)
    await first_steps(bench, num_nodes)
    now_s = asyncio.get_running_loop().time()
    for number in range(num_nodes):
        heartbeat = agents_pb2.AgentMessage(heartbeat=beat(number, 1))
        bench.edge.handle(NodeId(f"node-{number:05d}"), heartbeat, now_s)
    await bench.service.tell()


async def _scrape(folder: Path, num_nodes: int, rounds: int) -> dict[str, Any]:
    """The page, as it is made: figures in the loop, text beside it."""
    folder.mkdir()
    async with controller(folder) as bench:
        await train(bench, num_nodes)
        metrics = ControllerMetrics()
        metrics.read_from(
            Sources(
                service=bench.service,
                edge=bench.edge,
                sessions=bench.sessions,
                effects=bench.effects,
                counters=bench.counters,
                incoming=Incoming(bench.service.state),
                clock=SteadyClock(),
                trends=bench.trends,
            )
        )
        in_loop, beside, nbytes = [], [], 0
        for _ in range(rounds):
            begun_s = time.process_time()
            families = list(metrics.collect())
            taken_s = time.process_time()
            nbytes = len(exposition.generate_latest(_Taken(families)))
            in_loop.append(taken_s - begun_s)
            beside.append(time.process_time() - taken_s)
    return {
        "loop_s": statistics.median(in_loop),
        "text_s": statistics.median(beside),
        "bytes": nbytes,
    }


class _Taken(CollectorRegistry):
    """Families as they were at one moment."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Any:
        """Those."""
        return iter(self._families)


async def _messages(folder: Path, num_nodes: int, rounds: int) -> dict[str, Any]:
    """CPU seconds of the loop's turns, and bytes, of what clients and the page ask for."""
    folder.mkdir()
    context = cast(Any, None)
    async with controller(folder) as bench:
        await train(bench, num_nodes)

        async def watched() -> Message:
            request = jobs_pb2.WatchJobRequest(job_id=JOB, brief=True)
            async for response in bench.jobs.WatchJob(request, context):
                return response
            raise AssertionError("a job that runs is shown")

        asked: dict[str, Callable[[], Awaitable[Message]]] = {
            "job": lambda: bench.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=JOB), context),
            "jobs": lambda: bench.jobs.ListJobs(jobs_pb2.ListJobsRequest(), context),
            "watch": watched,
            "ranks": lambda: bench.ranks.ListRanks(ranks_pb2.ListRanksRequest(job_id=JOB), context),
        }
        return {name: await _asked(ask, rounds) for name, ask in asked.items()}


async def _asked(ask: Callable[[], Awaitable[Message]], rounds: int) -> dict[str, float]:
    """The longest turn of the loop, as other calls wait for that, and all of them."""

    async def sent() -> int:
        # As gRPC does it, in the loop.
        return len((await ask()).SerializeToString())

    longest, total, nbytes = [], [], 0
    for _ in range(rounds):
        # What is kept of the last answer for a while is not what is measured.
        await asyncio.sleep(1.1)
        turns = Turns()
        with turns.counted():
            nbytes = await asyncio.create_task(sent())
        longest.append(turns.longest_s)
        total.append(turns.total_s)
    return {
        "loop_s": statistics.median(longest),
        "total_s": statistics.median(total),
        "bytes": nbytes,
    }
