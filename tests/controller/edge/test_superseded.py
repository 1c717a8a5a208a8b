"""An agent whose place another has taken stays out, also when the controller was restarted."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import grpc
import pytest

from outlast.v1 import agents_pb2
from outlast.v1.agents_pb2_grpc import AgentsStub
from tests.controller.fakes import Lab, lab


async def _hello(bench: Lab, incarnation: str) -> agents_pb2.ControllerMessage:
    hello = agents_pb2.Hello(
        node_id="n0", incarnation=incarnation, address="127.0.0.1", rendezvous_port=4242, workers=1
    )
    call = AgentsStub(bench.channel).Session()
    await call.write(agents_pb2.AgentMessage(hello=hello))
    async for message in call:
        call.cancel()
        return message
    raise AssertionError("the stream ended without a word")


async def _is_refused(bench: Lab, incarnation: str) -> bool:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await _hello(bench, incarnation)
    return raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_superseded_agent_is_refused_by_the_next_controller_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(1)
            agent = bench.agents[0]
            first = agent.incarnation
            agent.incarnation = second = uuid.uuid4().hex
            await agent.rejoin()
            assert await _is_refused(bench, first)
        async with lab(tmp_path) as bench:
            # It would be the first that this controller hears.
            assert await _is_refused(bench, first)
            assert (await _hello(bench, second)).WhichOneof("kind") == "welcome"
        async with lab(tmp_path) as bench:
            # One that comes for the first time takes the place of the one on record.
            assert (await _hello(bench, "third")).WhichOneof("kind") == "welcome"
            assert await _is_refused(bench, second)

    asyncio.run(scenario())
