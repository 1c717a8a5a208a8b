"""An agent that knows two controllers: one that freezes, and one that leads from then on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import grpc.aio
import pytest

from controller.agent.addresses import Controllers
from controller.agent.config import AgentConfig
from controller.agent.core import clock_probes
from controller.agent.core.buffer import EventBuffer
from controller.agent.core.line import Line
from controller.agent.session import Session, SessionEvents
from outlast.ports import free_ports
from outlast.v1 import agents_pb2
from outlast.v1.agents_pb2_grpc import AgentsServicer, add_AgentsServicer_to_server
from tests.controller.fakes import until


class Answering(AgentsServicer):
    """Welcomes agents and echoes their clocks, until it is frozen."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.is_frozen = False
        self.num_beats = 0

    async def Session(  # the name of the method in the protocol
        self, requests: AsyncIterator[agents_pb2.AgentMessage], context: object
    ) -> AsyncIterator[agents_pb2.ControllerMessage]:
        """One session; taken and not answered while it is frozen."""
        async for request in requests:
            while self.is_frozen:
                await asyncio.sleep(0.01)
            if request.HasField("hello"):
                welcome = agents_pb2.Welcome(term=self.term, heartbeat_period_s=0.02)
                yield agents_pb2.ControllerMessage(welcome=welcome)
            elif request.heartbeat.clock_sent_ns:
                self.num_beats += 1
                echo = agents_pb2.ClockEcho(sent_ns=request.heartbeat.clock_sent_ns)
                yield agents_pb2.ControllerMessage(clock_echo=echo)


def session_of(addresses: str, folder: Path, terms: list[int]) -> Session:
    config = AgentConfig(
        node="n0",
        controller=addresses,
        state_dir=folder,
        memory_dir=folder,
        data_dir=folder,
        workers=1,
    )
    line: Line[agents_pb2.AgentEvent] = Line(EventBuffer(100), now_s=0.0)

    def welcomed(welcome: agents_pb2.Welcome) -> None:
        line.welcomed()
        terms.append(welcome.term)

    events = SessionEvents(
        hello=lambda: agents_pb2.Hello(node_id="n0", incarnation="one", workers=1),
        heartbeat=agents_pb2.Heartbeat,
        received=lambda message: None,
        welcomed=welcomed,
        lost=lambda: line.lost(0.0),
        acknowledged=line.acknowledged,
    )
    return Session(config, Controllers(config), line, events, Random(1))


async def serve(servicer: Answering, address: str) -> grpc.aio.Server:
    server = grpc.aio.server()
    add_AgentsServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server


def test_agent_leaves_a_controller_that_is_frozen_for_the_one_that_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_probes, "ANSWER_LIMIT_S", 3.0)
    monkeypatch.setattr(clock_probes, "WATCHING_PERIOD_S", 0.1)

    async def scenario() -> None:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        frozen, other = Answering(1), Answering(2)
        servers = [await serve(frozen, addresses[0])]
        terms: list[int] = []
        running = asyncio.create_task(session_of(",".join(addresses), tmp_path, terms).run())
        try:
            await until(lambda: frozen.num_beats > clock_probes.NUM_AT_FIRST, "it is answered")
            servers.append(await serve(other, addresses[1]))
            assert terms == [1]
            frozen.is_frozen = True
            await until(lambda: other.num_beats > clock_probes.NUM_AT_FIRST, "the other to answer")
            assert terms == [1, 2]
        finally:
            running.cancel()
            frozen.is_frozen = False
            await asyncio.gather(
                running, *(each.stop(0) for each in servers), return_exceptions=True
            )

    asyncio.run(scenario())
