"""Clocks of nodes from the round trips of heartbeats, from agent to client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from controller.agent import session as agent_session
from controller.agent.addresses import Controllers
from controller.agent.config import AgentConfig
from controller.agent.core.buffer import EventBuffer
from controller.agent.core.clock_probes import (
    ANSWER_LIMIT_S,
    NUM_AT_FIRST,
    PERIOD_S,
    ClockProbes,
)
from controller.agent.core.line import Line
from controller.agent.session import Session, SessionEvents
from outlast.cli.fleet import clock_words
from outlast.clock import node_time_ns
from outlast.v1 import agents_pb2, nodes_pb2
from outlast.v1.nodes_pb2_grpc import NodesStub
from tests.controller.fakes import Lab, lab, until

AHEAD_S = 5.0


@asynccontextmanager
async def agent_of(bench: Lab, folder: Path) -> AsyncIterator[Session]:
    """The line of an agent that has no workers."""
    line: Line[agents_pb2.AgentEvent] = Line(EventBuffer(max_events=1), now_s=0.0)
    hello = agents_pb2.Hello(node_id="real", incarnation="one", workers=1, address="127.0.0.1")
    config = AgentConfig(
        node="real",
        controller=bench.running.grpc,
        state_dir=folder,
        memory_dir=folder,
        data_dir=folder,
        workers=1,
    )
    session = Session(
        config,
        Controllers(config),
        line,
        SessionEvents(
            hello=lambda: hello,
            heartbeat=agents_pb2.Heartbeat,
            received=lambda _: None,
            welcomed=lambda _: line.welcomed(),
            lost=lambda: line.lost(0.0),
            acknowledged=lambda _: None,
        ),
        Random(1),
    )
    task = asyncio.create_task(session.run())
    try:
        yield session
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_a_node_whose_clock_is_ahead_is_listed_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        agent_session, "node_time_ns", lambda: node_time_ns() + round(AHEAD_S * 1e9)
    )

    async def scenario() -> None:
        async with lab(tmp_path / "state") as bench:
            # It sends heartbeats that ask nothing, as older agents do.
            await bench.add_agents(1)
            nodes = NodesStub(bench.channel)

            async def clocks() -> dict[str, nodes_pb2.Node]:
                listed = (await nodes.ListNodes(nodes_pb2.ListNodesRequest())).nodes
                return {node.node_id: node for node in listed if node.HasField("clock_ahead_s")}

            async with agent_of(bench, tmp_path) as session:
                async with asyncio.timeout(60.0):
                    while not (known := await clocks()):
                        # The answer to one heartbeat goes with the next.
                        session.beat_now()
                assert set(known) == {"real"}
                found = known["real"]
                assert 0.0 < found.clock_error_s < 60.0
                assert abs(found.clock_ahead_s - AHEAD_S) <= found.clock_error_s + 1e-6
            await until(lambda: bench.agents[0].is_connected, "the older agent stays")

    asyncio.run(scenario())


def test_heartbeats_ask_often_at_first_and_then_now_and_then() -> None:
    probes = ClockProbes()
    asked = [at_s for at_s in range(2, 100, 2) if probes.is_due(float(at_s))]
    at_first = list(range(2, 2 * NUM_AT_FIRST + 1, 2))
    assert asked == at_first + [at_first[-1] + round(PERIOD_S) * each for each in range(1, 6)]
    probes.began()
    assert probes.is_due(100.0)


@pytest.mark.parametrize(
    ("watches", "answers", "gives_up"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_a_controller_that_stops_answering_is_given_up_where_there_is_another(
    watches: bool, answers: bool, gives_up: bool
) -> None:
    probes = ClockProbes(watches=watches)
    probes.began()
    assert probes.is_due(0.0)
    # One of an older version never answers.
    if answers:
        probes.answered()
    assert probes.is_due(2.0)
    assert probes.is_due(4.0)
    assert not probes.is_unanswered(2.0 + ANSWER_LIMIT_S)
    assert probes.is_unanswered(2.1 + ANSWER_LIMIT_S) is gives_up
    probes.answered()
    assert not probes.is_unanswered(100.0)


def test_a_clock_is_told_in_a_unit_that_shows_its_error() -> None:
    assert clock_words(0.00124, 0.00008) == "+1.24 ±0.08 ms"
    assert clock_words(-1.5, 0.0004) == "-1500.00 ±0.40 ms"
    assert clock_words(-1e-6, 0.00004) == "-1.00 ±40.00 µs"
    assert clock_words(-1.5, 0.4) == "-1.50 ±0.40 s"
