"""What a fleet of 12,500 nodes costs the controller's one loop.

The production service, journal and tables in one process; nodes are answers, without
gRPC. Four cases, each in a process of its own: the first start of a job on every node; the
same for a job that was there before the nodes; the same with a controller that dies when half
of the nodes have answered; and a running job of 100,000 ranks with and without three clients
that watch it.

Times are CPU time of the callbacks of the event loop, so that a busy machine does not
change them much.

    python -m bench.controller [--nodes 12500]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from bench.bare_controller import Bench, Turns, controller
from bench.controller.claims import NUM_WATCHERS, WATCHED_S, claims_of
from bench.controller.fleet import JOB, answer, beat, first_steps, join, submit
from bench.results import write
from controller.core import events as ev
from controller.core.states import JobState
from controller.store.curves import StepRow
from outlast.ids import Attempt, NodeId
from outlast.v1 import agents_pb2, jobs_pb2

# Each in a process of its own; a restart needs what a half start has left.
_CASES = ("start", "queued", "half", "restart", "watch0", f"watch{NUM_WATCHERS}")


def written_bytes() -> int:
    """Bytes that this process has written so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def figures(turns: Turns, bench: Bench, begun_bytes: int) -> dict[str, Any]:
    job = bench.service.state.jobs[JOB]
    return {
        "state": str(job.state),
        "journal_bytes": written_bytes() - begun_bytes,
        "blocked_s": turns.total_s,
        "longest_turn_s": turns.longest_s,
        "turns": turns.num,
        "snapshots": bench.snapshots,
        "sent_bytes": sum(bench.sent),
        "peak_bytes": peak_bytes(),
        "longest_reason": max(
            len(job.reason), *(len(each.reason) for each in bench.service.state.nodes.values())
        ),
    }


async def start(
    folder: Path, num_nodes: int, *, half: bool = False, queued: bool = False
) -> dict[str, Any]:
    """The first start of a job; with `half`, only until so many nodes have answered.

    With `queued`, the job is there first and waits for the nodes.
    """
    turns = Turns()
    async with controller(folder) as bench:
        begun_bytes = written_bytes()
        with turns.counted():
            if queued:
                await submit(bench, num_nodes)
            await join(bench, num_nodes)
            if not queued:
                await submit(bench, num_nodes)
            await answer(bench, num_nodes // 2 if half else None)
            if not half:
                await first_steps(bench, num_nodes)
        found = figures(turns, bench, begun_bytes)
    wanted = JobState.PREFLIGHT if half else JobState.RUNNING
    assert found["state"] == wanted, f"the job is {found['state']}, not {wanted}"
    return found


async def restart(folder: Path, num_nodes: int) -> dict[str, Any]:
    """A controller starts on what another left in the middle of a first start."""
    turns = Turns()
    begun_s = time.process_time()
    begun_bytes = written_bytes()
    async with controller(folder) as bench:
        loaded_s = time.process_time() - begun_s
        with turns.counted():
            await join(bench, num_nodes)
            await answer(bench)
            await first_steps(bench, num_nodes)
        found = figures(turns, bench, begun_bytes) | {"load_s": loaded_s}
    assert found["state"] == JobState.RUNNING, f"the job is {found['state']}"
    return found


class Reader:
    """In the place of gRPC's context: nobody refuses anything here."""


async def follow(bench: Bench, received: list[int]) -> None:
    request = jobs_pb2.WatchJobRequest(job_id=JOB, brief=True)
    async for response in bench.jobs.WatchJob(request, cast(Any, Reader())):
        received.append(len(response.SerializeToString()))


async def watch_one(folder: Path, num_nodes: int, watchers: int) -> dict[str, Any]:
    """A job that completes ten steps a second, while clients watch it."""
    turns, received = Turns(), list[int]()
    async with controller(folder) as bench:
        loop = asyncio.get_running_loop()
        await join(bench, num_nodes)
        await submit(bench, num_nodes)
        await answer(bench)
        await first_steps(bench, num_nodes)
        for number in range(num_nodes):
            heartbeat = agents_pb2.AgentMessage(heartbeat=beat(number, 1))
            bench.edge.handle(NodeId(f"node-{number:05d}"), heartbeat, loop.time())
        judged: list[float] = []
        expire = bench.edge.judge_silence

        def judging(now_s: float) -> list[ev.Event]:
            judged.append(now_s)
            return expire(now_s)

        bench.edge.judge_silence = judging  # type: ignore[method-assign]  # only notes when
        tasks = [asyncio.create_task(follow(bench, received)) for _ in range(watchers)]
        begun_s, step = loop.time(), 1
        cpu_s = time.process_time()
        with turns.counted():
            while loop.time() - begun_s < WATCHED_S:
                step += 1
                bench.service.offer([], [_row(step)])
                await asyncio.sleep(0.1)
        took_s = loop.time() - begun_s
        waits = [
            b - a for a, b in zip([begun_s, *judged], [*judged, begun_s + took_s], strict=True)
        ]
        cpu_s = time.process_time() - cpu_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "watchers": watchers,
        "watched_s": took_s,
        "cpu_share": cpu_s / took_s,
        "longest_turn_s": turns.longest_s,
        "messages": len(received),
        "message_bytes": sum(received),
        "steps": step,
        "judgements": len(judged),
        "longest_without_judgement_s": max(waits),
    }


def _row(step: int) -> StepRow:
    return StepRow(
        job=JOB,
        step=step,
        attempt=Attempt(1),
        loss=2.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=1024,
        duration_s=0.1,
        at_s=time.time(),
    )


async def _case(name: str, folder: Path, num_nodes: int) -> dict[str, Any]:
    match name:
        case "start":
            return await start(folder, num_nodes)
        case "queued":
            return await start(folder, num_nodes, queued=True)
        case "half":
            return await start(folder, num_nodes, half=True)
        case "restart":
            return await restart(folder, num_nodes)
        case _:
            return await watch_one(folder, num_nodes, int(name.removeprefix("watch")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--case", help="one case, in this process")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.case:
        found = asyncio.run(_case(options.case, options.folder, options.nodes))
        print(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory(prefix="outlast-bench-") as folder:
        rows = [_in_process(case, Path(folder), options.nodes) for case in _CASES]
    write("controller", rows, claims_of({row["case"]: row for row in rows}, options.nodes))
    return 0


def _in_process(case: str, root: Path, num_nodes: int) -> dict[str, Any]:
    """One case in a fresh process: its memory is its own."""
    folder = root / ("half" if case == "restart" else case)
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bench.controller", "--nodes", str(num_nodes)]
    command += ["--case", case, "--folder", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    row = {"case": case, "nodes": num_nodes, **json.loads(done.stdout.splitlines()[-1])}
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
