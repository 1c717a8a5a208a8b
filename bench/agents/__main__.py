"""A fleet's agents on one core: streams of heartbeats, a storm of reconnects, silent nodes.

The production controller as a process on one core, beside a bare gRPC server with the same load;
agents in this process, on another core and niced. A job on every node makes each heartbeat one of
eight training ranks.

    python -m bench.agents [--agents 1000 3000 6000 12500]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from bench.agents.claims import claims_of
from bench.agents.load import Fleet, percentile
from bench.controller.fleet import WORKERS
from bench.results import write
from outlast.ports import free_port
from outlast.spec.message import struct_of
from outlast.v1 import agents_pb2, jobs_pb2, nodes_pb2
from outlast.v1.jobs_pb2_grpc import JobsStub
from outlast.v1.nodes_pb2_grpc import NodesStub

PERIOD_S = 2.0
_WARM_S, _MEASURED_S = 10.0, 20.0
_JOIN_S, _JOB_S = 120.0, 180.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[Any], address: str) -> None:
        self.process = process
        self.address = address

    def cpu_s(self) -> float:
        """Of all its threads so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def peak_bytes(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        (line,) = (each for each in lines if each.startswith("VmHWM"))
        return int(line.split()[1]) * 1024


@asynccontextmanager
async def served(kind: str, folder: Path) -> AsyncIterator[Served]:
    """A controller, or the bare server, on the first core; what calls is on the last one."""
    cores = sorted(os.sched_getaffinity(0))
    port = free_port()
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "bench.agents.bare", str(port)]
    if kind == "controller":
        command = [sys.executable, "-m", "controller", "--state-dir", str(folder / "state")]
        command += ["--grpc", address, "--http", "127.0.0.1:0"]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    os.sched_setaffinity(process.pid, cores[:1])
    os.sched_setaffinity(0, cores[-1:])
    try:
        async with asyncio.timeout(60):
            while await asyncio.to_thread(_is_deaf, port):
                assert process.poll() is None, (folder / "server.log").read_text()
                await asyncio.sleep(0.1)
        yield Served(process, address)
    finally:
        os.sched_setaffinity(0, cores)
        process.terminate()
        await asyncio.to_thread(process.wait)


def _is_deaf(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def steady(fleet: Fleet, server: Served) -> dict[str, Any]:
    """What a heartbeat costs, and how long it is on its way."""
    await asyncio.sleep(_WARM_S)
    fleet.take_latencies()
    sent, cpu_s, begun_s = fleet.num_sent(), server.cpu_s(), time.monotonic()
    own_s = time.process_time()
    await asyncio.sleep(_MEASURED_S)
    took_s = time.monotonic() - begun_s
    latencies = fleet.take_latencies()
    return {
        "heartbeats_per_s": (fleet.num_sent() - sent) / took_s,
        "core_share": (server.cpu_s() - cpu_s) / took_s,
        "load_core_share": (time.process_time() - own_s) / took_s,
        "p50_s": percentile(latencies, 0.5),
        "p99_s": percentile(latencies, 0.99),
        "most_s": latencies[-1],
    }


async def train(fleet: Fleet, jobs: Any) -> tuple[str, float]:
    """A job on all nodes; its id, and seconds until every rank had done a step."""
    count = len(fleet.agents)
    document = {
        "name": "large",
        "steps": 100_000,
        "model": {"layers": 2, "hidden": 64, "heads": 8},
        "parallel": {"tp": WORKERS, "dp": count},
        "data": {"global_batch": count},
        "resources": {"workers_per_node": WORKERS},
        "recovery": {"preflight": False},
    }
    begun_s = time.monotonic()
    request = jobs_pb2.SubmitRequest(spec=struct_of(document), wait_for_nodes=True)
    job_id = (await jobs.Submit(request, timeout=60)).job.job_id
    await reach(jobs, job_id, "RUNNING")
    return job_id, time.monotonic() - begun_s


async def reach(jobs: Any, job_id: str, *states: str, leaves: bool = False) -> str:
    """Wait until a job is in one of the states, or in none of them any more."""
    async with asyncio.timeout(_JOB_S):
        while True:
            asked = jobs_pb2.GetJobRequest(job_id=job_id)
            job = (await jobs.GetJob(asked, timeout=60)).job
            if (job.state in states) is not leaves:
                return str(job.reason)
            await asyncio.sleep(0.1)


async def storm(fleet: Fleet) -> float:
    """Every connection breaks at once; seconds until all have a session again."""
    for agent in fleet.agents:
        agent.is_welcome.clear()
        agent.hang_up()
    begun_s = time.monotonic()
    await fleet.welcome(_JOIN_S)
    return time.monotonic() - begun_s


async def fall_silent(fleet: Fleet, jobs: Any, nodes: Any, job_id: str) -> dict[str, Any]:
    """One agent says nothing more, with its connection open; how long until the job stops."""
    silent = fleet.agents[len(fleet.agents) // 2]
    silent.beats = False
    begun_s = time.monotonic()
    reason = await reach(jobs, job_id, "RUNNING", leaves=True)
    took_s = time.monotonic() - begun_s
    node = (await nodes.GetNode(nodes_pb2.GetNodeRequest(node_id=silent.node), timeout=60)).node
    assert "heartbeat_silent_s" in node.reason, f"{node.state}: {node.reason}; the job: {reason}"
    return {"silent_found_s": took_s}


async def lose_half(fleet: Fleet, server: Served) -> dict[str, Any]:
    """Half of the agents are gone at once; what becomes of the heartbeats of the others.

    The silent one is the first of those that are gone.
    """
    fleet.take_latencies()
    await fleet.lose(0.5)
    cpu_s, begun_s = server.cpu_s(), time.monotonic()
    await asyncio.sleep(_MEASURED_S)
    latencies = fleet.take_latencies()
    return {
        "lost_core_share": (server.cpu_s() - cpu_s) / (time.monotonic() - begun_s),
        "lost_p99_s": percentile(latencies, 0.99),
        "lost_most_s": latencies[-1],
    }


async def measure(kind: str, count: int, folder: Path) -> dict[str, Any]:
    """One case, in this process."""
    row: dict[str, Any] = {"server": kind, "agents": count}
    async with served(kind, folder) as server:
        # The server is not.
        os.nice(5)
        fleet = Fleet(count, server.address, PERIOD_S)
        row["join_s"] = await fleet.join(_JOIN_S)
        if kind == "bare":
            for number, agent in enumerate(fleet.agents):
                ranks = range(WORKERS * number, WORKERS * (number + 1))
                start = agents_pb2.StartWorkers(ranks=ranks)
                command = agents_pb2.Command(job_id="large-00000", attempt=1, start_workers=start)
                agent.train(command)
            row |= await steady(fleet, server)
        else:
            async with grpc.aio.insecure_channel(server.address) as channel:
                jobs, nodes = JobsStub(channel), NodesStub(channel)
                job_id, row["start_s"] = await train(fleet, jobs)
                row |= await steady(fleet, server)
                row["storm_s"] = await storm(fleet)
                await reach(jobs, job_id, "RUNNING")
                row |= await fall_silent(fleet, jobs, nodes, job_id)
                row |= await lose_half(fleet, server)
        row["peak_bytes"] = server.peak_bytes()
        await fleet.leave()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    counts = [1_000, 3_000, 6_000, 12_500]
    parser.add_argument("--agents", type=int, nargs="+", default=counts, metavar="N")
    parser.add_argument("--case", choices=("controller", "bare"), help="one, in this process")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as name:
        if given.case:
            (count,) = given.agents
            print(json.dumps(asyncio.run(measure(given.case, count, Path(name)))))
            return 0
    rows = [_in_process(kind, count) for count in given.agents for kind in ("bare", "controller")]
    write("agents", rows, claims_of(rows))
    return 0


def _in_process(kind: str, count: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.agents", "--case", kind, "--agents", str(count)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
