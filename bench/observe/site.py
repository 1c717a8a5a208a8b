"""The page of a controller whose job has 10,000 ranks, as a server of its own.

Service, gRPC services, gateway and web app are the controller's. Agents are events, as in `fleet`;
asked what their ranks have noted they answer where an agent's stream would be read. What an agent
reads from black boxes is made here: the newest steps of each rank. What the job has behind it is
`past`.

    python -m bench.observe.site FOLDER NODES STEPS PAST_STEPS       prints where it listens
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import grpc.aio
import numpy as np
import numpy.typing as npt

from bench.bare_controller import Bench, controller
from bench.controller.fleet import WORKERS
from bench.observe.fleet import train
from bench.observe.past import Past, fill
from controller.access.audit import Audit
from controller.access.callers import Callers
from controller.access.gate import Gate
from controller.addresses import bind_http, name_of
from controller.rpc.access import AccessService
from controller.rpc.incidents import IncidentsService
from controller.rpc.nodes import NodesService
from controller.rpc.trends import TrendsService
from controller.sessions.session import AgentSession
from controller.store.node_certificates import NodeCertificates
from controller.web.app import Web
from controller.web.metrics import ControllerMetrics
from outlast.clock import SystemClock
from outlast.ids import NodeId
from outlast.v1 import agents_pb2, ranks_pb2
from outlast.v1.access_pb2_grpc import add_AccessServicer_to_server
from outlast.v1.incidents_pb2_grpc import add_IncidentsServicer_to_server
from outlast.v1.jobs_pb2_grpc import add_JobsServicer_to_server
from outlast.v1.nodes_pb2_grpc import add_NodesServicer_to_server
from outlast.v1.ranks_pb2_grpc import add_RanksServicer_to_server
from outlast.v1.trends_pb2_grpc import add_TrendsServicer_to_server

# One rank is slow in all steps, and another in some: what the map is to mark.
SLOW_RANK, HICCUP_RANK = 4321, 17
# So many ranks are unlike each other.
_KINDS = 64
_NOISE = 0.03


class _Times:
    """What each rank's steps took, as its agent sums them up."""

    def __init__(self, num_ranks: int, num_steps: int) -> None:
        self._special = {SLOW_RANK % num_ranks: _KINDS, HICCUP_RANK % num_ranks: _KINDS + 1}
        random = np.random.default_rng(1)
        seconds = random.normal(1, _NOISE, (_KINDS + 2, num_steps))
        seconds[_KINDS] *= 1.4
        seconds[_KINDS + 1, num_steps // 2 : num_steps // 2 + 8] *= 2
        self._seconds = seconds
        self._sent: dict[int, list[bytes]] = {}

    def of(self, rank: int, most_steps: int) -> bytes:
        """A message for the controller, of the newest steps."""
        if most_steps not in self._sent:
            self._sent[most_steps] = [_message(each, most_steps) for each in self._seconds]
        return self._sent[most_steps][self._special.get(rank, rank % _KINDS)]


def _message(seconds: npt.NDArray[np.float64], most_steps: int) -> bytes:
    steps = range(1, len(seconds) + 1)[-most_steps:]
    measured = ranks_pb2.MeasuredSteps(steps=steps, seconds=seconds[-most_steps:])
    return ranks_pb2.RankTimes(measured=measured).SerializeToString()


async def _serve(folder: Path, num_nodes: int, num_steps: int, num_past: int) -> None:
    times = _Times(num_nodes * WORKERS, num_steps)
    callers, audit = Callers(None), Audit(folder)
    async with controller(folder) as bench:
        await train(bench, num_nodes)
        await fill(bench, Past(steps=num_past))
        gate = Gate(callers, audit, bench.service.owner_of, "of this process")
        server = grpc.aio.server(interceptors=[gate])
        add_AccessServicer_to_server(AccessService(callers, audit), server)
        add_JobsServicer_to_server(bench.jobs, server)
        certificates = NodeCertificates(bench.database, time.time())
        nodes = NodesService(bench.service, bench.sessions, bench.edge, SystemClock(), certificates)
        add_NodesServicer_to_server(nodes, server)
        add_IncidentsServicer_to_server(IncidentsService(bench.service), server)
        add_RanksServicer_to_server(bench.ranks, server)
        trends = TrendsService(bench.service, bench.trends, bench.runs, {})
        add_TrendsServicer_to_server(trends, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        metrics = ControllerMetrics()
        web = Web(bench.service, bench.journal, bench.sessions, metrics, callers, audit)
        http = bind_http("127.0.0.1:0")
        # They are read until the process ends.
        names = [NodeId(f"node-{number:05d}") for number in range(num_nodes)]
        answers = [
            asyncio.create_task(_answer(bench, bench.sessions.open(name, "one"), number, times))
            for number, name in enumerate(names)
        ]
        print(name_of(http), flush=True)
        await asyncio.gather(web.serve(http, f"127.0.0.1:{port}"), *answers)


async def _answer(bench: Bench, session: AgentSession, number: int, times: _Times) -> None:
    """A node's agent, as far as it is asked for times."""
    async for message in session.outgoing():
        query = message.log_query
        if not query.times:
            continue
        for rank in range(WORKERS * number, WORKERS * (number + 1)):
            chunk = agents_pb2.LogChunk(
                query_id=query.query_id, rank=rank, attempt=1, data=times.of(rank, query.most_steps)
            )
            bench.logs.deliver(session.node, chunk)
        end = agents_pb2.LogChunk(query_id=query.query_id, end=True)
        bench.logs.deliver(session.node, end)
        # The streams of others are read in between, and what has come is sent on.
        await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), *map(int, sys.argv[2:])))
