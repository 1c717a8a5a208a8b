"""A gRPC server that reads agents' messages and notes when it heard of whom: what is left of a
controller without all that it does.

    python -m bench.agents.bare PORT
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from outlast.clock import node_time_ns
from outlast.v1 import agents_pb2
from outlast.v1.agents_pb2_grpc import AgentsServicer, add_AgentsServicer_to_server


class Bare(AgentsServicer):
    """Answers what a session takes, and nothing else."""

    def __init__(self) -> None:
        self.heard_ns: dict[str, int] = {}

    async def Session(
        self, request_iterator: AsyncIterator[agents_pb2.AgentMessage], context: Any
    ) -> AsyncIterator[agents_pb2.ControllerMessage]:
        node = ""
        async for message in request_iterator:
            received_ns = node_time_ns()
            if message.HasField("hello"):
                node = message.hello.node_id
                welcome = agents_pb2.Welcome(term=1, heartbeat_period_s=2.0)
                yield agents_pb2.ControllerMessage(welcome=welcome)
            self.heard_ns[node] = received_ns
            if sent_ns := message.heartbeat.clock_sent_ns:
                echo = agents_pb2.ClockEcho(sent_ns=sent_ns, received_ns=received_ns)
                yield agents_pb2.ControllerMessage(clock_echo=echo)


async def serve(port: int) -> None:
    server = grpc.aio.server()
    add_AgentsServicer_to_server(Bare(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("listens", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
