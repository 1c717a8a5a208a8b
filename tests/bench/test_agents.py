"""The benchmark of agents' streams, with a few of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.agents.__main__ import served
from bench.agents.load import Fleet, percentile


def test_agents_join_beat_and_come_back_when_connections_break(tmp_path: Path) -> None:
    async def live() -> None:
        async with served("bare", tmp_path) as server:
            fleet = Fleet(8, server.address, 0.05)
            await fleet.join(30.0)
            for agent in fleet.agents:
                agent.is_welcome.clear()
                agent.hang_up()
            await fleet.welcome(30.0)
            async with asyncio.timeout(30.0):
                while not (latencies := fleet.take_latencies()):
                    await asyncio.sleep(0.01)
            assert fleet.num_sent() > 0
            assert 0.0 <= percentile(latencies, 0.5) < 30.0
            assert server.cpu_s() > 0.0
            await fleet.leave()

    asyncio.run(live())
