"""Agents that say goodbye under a job, again and again, as people see it."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from controller.core.leaving import MANY_STOPS
from controller.service import Service
from outlast.v1 import agents_pb2, nodes_pb2
from outlast.v1.nodes_pb2_grpc import NodesStub
from tests.controller.fakes import Lab, lab


async def _stop_again(bench: Lab, job_id: str, attempt: int) -> None:
    """The agent of n0 is stopped in order, and started again."""
    agent = bench.agents[0]
    said = agents_pb2.Goodbye(incarnation=agent.incarnation)
    await agent.send(agents_pb2.AgentEvent(goodbye=said))
    await bench.reach(job_id, "PROVISIONING")
    agent.running.clear()
    agent.incarnation = uuid.uuid4().hex
    await agent.rejoin()
    await bench.started(attempt)
    await bench.train(attempt)
    await bench.reach(job_id, "RUNNING")


@pytest.mark.parametrize("is_leaving", [False, True])
def test_node_whose_agent_is_stopped_again_and_again_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_leaving: bool
) -> None:
    """Unless it was this controller that stopped it, as `outlast up` does when it ends."""
    begin = Service.__init__

    def leaving(self: Service, **parts: object) -> None:
        begin(self, **parts)  # type: ignore[arg-type]  # as it is called
        self.is_leaving = is_leaving

    monkeypatch.setattr(Service, "__init__", leaving)

    async def scenario() -> None:
        async with lab(tmp_path) as bench:
            await bench.add_agents(2)
            job_id = await bench.start_job()
            for number in range(MANY_STOPS):
                await _stop_again(bench, job_id, number + 2)
            answer = await NodesStub(bench.channel).ListNodes(nodes_pb2.ListNodesRequest())
            reasons = {node.node_id: node.reason for node in answer.nodes}
            is_noted = "was stopped in order 3 times within the hour" in reasons["n0"]
            assert is_noted is not is_leaving
            assert "stopped in order" not in reasons["n1"]
            assert (await bench.job(job_id)).open_incident == ""

    asyncio.run(scenario())
