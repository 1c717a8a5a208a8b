"""A job on every node of a fleet, and what its agents say: answers, steps, heartbeats."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench.bare_controller import Bench
from controller.convert import plan_of
from controller.core import events as ev
from outlast.failures import ErrorKind
from outlast.ids import CommandId, JobId, NodeId
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2, common_pb2

WORKERS = 8
JOB = JobId("large-00000")


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
