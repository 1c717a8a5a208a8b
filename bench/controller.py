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
from bench.results import Claim, write
from controller.convert import plan_of
from controller.core import events as ev
from controller.core.states import JobState
from controller.store.curves import StepRow
from outlast.failures import ErrorKind
from outlast.ids import Attempt, CommandId, JobId, NodeId
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2, common_pb2, jobs_pb2

WORKERS = 8
JOB = JobId("large-00000")
# The version that this program was written for, with 2,000 nodes on the same machine (12,500
# did not fit): the job's whole record with every answer, every rank's node in every order.
_BEFORE = "the version with whole records in the journal, 2,000 nodes"
# How long the watched job is looked at.
WATCHED_S = 10.0
NUM_WATCHERS = 3
# Each in a process of its own; a restart needs what a half start has left.
_CASES = ("start", "queued", "half", "restart", "watch0", "watch3")


def spec_of_all(num_nodes: int) -> Any:
    """A job of every node."""
    return parse_spec(
        {
            "name": "large",
            "steps": 100_000,
            "model": {"layers": 2, "hidden": 64, "heads": 8},
            "parallel": {"tp": WORKERS, "dp": num_nodes},
            "data": {"global_batch": num_nodes},
            "resources": {"workers_per_node": WORKERS},
        }
    )


async def join(bench: Bench, num_nodes: int) -> None:
    """Every agent opens a session."""
    now_s = asyncio.get_running_loop().time()
    for number in range(num_nodes):
        node = NodeId(f"node-{number:05d}")
        hello = agents_pb2.Hello(
            node_id=node,
            incarnation="one",
            address=f"10.{number // 65536}.{number // 256 % 256}.{number % 256}",
            rendezvous_port=29500,
            workers=WORKERS,
        )
        bench.service.post(*bench.edge.handle(node, agents_pb2.AgentMessage(hello=hello), now_s))
        if number % 256 == 255:
            await bench.service.tell()
    # On a busy machine the first of them would be late by now: they do not beat in here.
    now_s = asyncio.get_running_loop().time()
    for number in range(num_nodes):
        bench.service.post(*bench.edge.heard(NodeId(f"node-{number:05d}"), now_s))
    await bench.service.tell()


async def submit(bench: Bench, num_nodes: int) -> None:
    spec = spec_of_all(num_nodes)
    await bench.service.tell(
        ev.JobSubmitted(
            job_id=JOB,
            name=spec.name,
            request_id="bench",
            spec_json=spec.canonical_json(),
            checkpoint_url="file:///checkpoints",
            plan=plan_of(spec),
        )
    )


async def answer(bench: Bench, upto: int | None = None) -> int:
    """Answer what agents were told, as they would, one by one; how many answers that took."""
    answered = 0
    while bench.commands and answered != upto:
        told, bench.commands[:] = bench.commands[:], []
        for place, (node, command_id, kind) in enumerate(told):
            bench.service.offer(
                [
                    ev.CommandFinished(
                        command_id=CommandId(command_id),
                        node=node,
                        ok=True,
                        verdict="pass" if kind == "run_suite" else "",
                        detail="",
                        error_kind=ErrorKind.NONE,
                        completed_step=-1,
                    )
                ]
            )
            answered += 1
            if answered == upto:
                bench.commands[:0] = told[place + 1 :]
                break
            if answered % 64 == 0:
                # They do not all come in the same moment.
                await asyncio.sleep(0)
        await bench.service.tell()
    return answered


async def first_steps(bench: Bench, num_nodes: int) -> None:
    """Every node's ranks complete their first step."""
    loop = asyncio.get_running_loop()
    for number in range(num_nodes):
        made = agents_pb2.AgentEvent(
            job_id=JOB,
            attempt=1,
            progress=agents_pb2.ProgressMade(completed_step=1, resumed_step=0),
        )
        node = NodeId(f"node-{number:05d}")
        bench.service.offer(
            bench.edge.handle(node, agents_pb2.AgentMessage(event=made), loop.time())
        )
    await bench.service.tell()


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


def beat(number: int, step: int) -> agents_pb2.Heartbeat:
    """A heartbeat of a node whose ranks all train."""
    split = common_pb2.StepSplit(
        **dict.fromkeys(common_pb2.StepSplit.DESCRIPTOR.fields_by_name, 0.1)
    )
    use = agents_pb2.RankUse(split=split, peak_memory_bytes=2**30)
    return agents_pb2.Heartbeat(
        at_s=time.time(),
        ranks=[
            agents_pb2.RankSummary(
                job_id=JOB,
                attempt=1,
                rank=rank,
                phase="forward_backward",
                completed_step=step,
                use=use,
            )
            for rank in range(WORKERS * number, WORKERS * (number + 1))
        ],
    )


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
    write("controller", rows, _claims({row["case"]: row for row in rows}, options.nodes))
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


def _claims(rows: dict[str, dict[str, Any]], num_nodes: int) -> list[Claim]:
    first, restarted, watched = rows["start"], rows["restart"], rows["watch3"]
    queued = rows["queued"]
    where = f"{num_nodes} nodes of {WORKERS} ranks"
    how = "service, journal and tables in one process, agents as events; CPU time, bytes written"
    return [
        Claim(
            claim=f"first start on {where}: bytes that the journal writes",
            value=first["journal_bytes"] / 1e6,
            unit="MB",
            goal="<= 300",
            baseline=f"630 MB ({_BEFORE})",
            how=how,
        ),
        Claim(
            claim=f"first start on {where}: CPU time of the loop",
            value=first["blocked_s"],
            unit="s",
            goal="<= 30",
            baseline=f"6.2 s ({_BEFORE})",
            how=how,
        ),
        Claim(
            claim=f"first start on {where}: longest turn of the loop, by CPU time",
            value=first["longest_turn_s"],
            unit="s",
            goal="<= 5",
            baseline=f"3.4 s ({_BEFORE})",
            how=how,
        ),
        Claim(
            claim=f"{where} join one by one while a job waits for all: CPU time of the loop",
            value=queued["blocked_s"],
            unit="s",
            goal="<= 30",
            baseline="a look at all nodes for each that joins",
            how=how,
        ),
        Claim(
            claim=f"first start on {where}: peak memory of the controller",
            value=first["peak_bytes"] / 2**20,
            unit="MiB",
            goal="<= 1024",
            baseline=f"1,666 MiB ({_BEFORE})",
            how="resident set of the process; orders are made one by one, as streams take them",
        ),
        Claim(
            claim=f"restart in the middle of a first start on {where}: peak memory",
            value=restarted["peak_bytes"] / 2**20,
            unit="MiB",
            goal="<= 1024",
            baseline="the state itself",
            how=f"half of the checks answered, then a new process; {restarted['snapshots']} "
            "snapshots while it starts",
        ),
        Claim(
            claim=f"{NUM_WATCHERS} clients watch a job on {where}: share of one core",
            value=watched["cpu_share"],
            unit="of a core",
            goal="<= 0.5",
            baseline=f"{rows['watch0']['cpu_share']:.3f} with no client",
            how=f"ten step reports a second for {WATCHED_S:g} s, agents as a table",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
