"""Logs of workers: asked of the agents of a job, merged into one stream.

The chunks come over the same streams as heartbeats, so a reader that is slow
must never hold one up: it is dropped when too much waits for it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator

from controller.core.records import JobRecord
from controller.core.states import TERMINAL
from controller.rpc.sessions import Sessions
from controller.service import Service
from outlast.errors import RetryableError
from outlast.ids import JobId, NodeId
from outlast.v1 import agents_pb2, jobs_pb2

# Of one reader, waiting to be sent. A tail of 16 MiB from a few ranks fits.
MAX_WAITING_BYTES = 64 * 2**20
MAX_QUERIES = 256
# After the end of a job its agents send the rest of its logs within a fraction of this.
QUIET_S = 1.0


class SlowReaderError(RetryableError):
    """A reader of logs fell too far behind."""


class TooManyQueriesError(RetryableError):
    """As many logs are being read as may be."""


class _Query:
    """One reader, and the nodes that answer it."""

    def __init__(self, request: jobs_pb2.LogsRequest) -> None:
        self.request = request
        self.query_id = uuid.uuid4().hex
        # Nodes that were asked; True while they still answer.
        self.nodes: dict[NodeId, bool] = {}
        # Nodes whose session ended while they were followed: asked again when they are back.
        self.left: dict[NodeId, None] = {}
        self.chunks: deque[jobs_pb2.LogsResponse] = deque()
        self.waiting_bytes = 0
        self.is_too_slow = False
        self._ready = asyncio.Event()

    def wake(self) -> None:
        self._ready.set()

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for something new; False when there was nothing in that time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        self._ready.clear()
        return True

    def put(self, chunk: jobs_pb2.LogsResponse) -> None:
        if self.waiting_bytes + len(chunk.data) > MAX_WAITING_BYTES:
            self.is_too_slow = True
        else:
            self.chunks.append(chunk)
            self.waiting_bytes += len(chunk.data)
        self.wake()

    def take(self) -> jobs_pb2.LogsResponse:
        chunk = self.chunks.popleft()
        self.waiting_bytes -= len(chunk.data)
        return chunk

    def ended(self, node: NodeId) -> None:
        if node in self.nodes:
            self.nodes[node] = False
            self.wake()

    def node_left(self, node: NodeId) -> None:
        if node not in self.nodes:
            return
        if self.request.follow:
            del self.nodes[node]
            self.left[node] = None
        else:
            self.nodes[node] = False
        self.wake()


class LogQueries:
    """The readers of logs, and the routing of what agents answer."""

    def __init__(self, service: Service, sessions: Sessions) -> None:
        self._service = service
        self._sessions = sessions
        self._queries: dict[str, _Query] = {}
        sessions.on_closed(self._node_left)

    def deliver(self, node: NodeId, chunk: agents_pb2.LogChunk) -> None:
        """A piece of a log from an agent."""
        query = self._queries.get(chunk.query_id)
        if query is None:
            # Whoever asked has gone: the agent need not go on.
            self._cancel(chunk.query_id, node)
        elif node not in query.nodes:
            return  # It was not asked, or has left since.
        elif chunk.end:
            query.ended(node)
        else:
            query.put(
                jobs_pb2.LogsResponse(
                    node=node,
                    rank=chunk.rank,
                    attempt=chunk.attempt,
                    data=chunk.data,
                    at_s=chunk.at_s,
                )
            )

    async def read(self, request: jobs_pb2.LogsRequest) -> AsyncIterator[jobs_pb2.LogsResponse]:
        """Logs of a job that exists, until they end; when followed, until the job ends.

        Raises:
            SlowReaderError: the caller takes them too slowly.
            TooManyQueriesError: others must end first.
        """
        if len(self._queries) >= MAX_QUERIES:
            raise TooManyQueriesError(f"{MAX_QUERIES} logs are being read already")
        query = _Query(request)
        self._queries[query.query_id] = query
        job_id = JobId(request.job_id)
        changes = asyncio.create_task(self._wake_on_change(query))
        try:
            while True:
                job = self._service.state.jobs[job_id]
                has_ended = job.state in TERMINAL
                self._ask(query, job, follow=request.follow and not has_ended)
                while query.chunks:
                    yield query.take()
                if query.is_too_slow:
                    raise SlowReaderError("the logs come faster than they are read")
                is_answered = not any(query.nodes.values())
                if is_answered and (has_ended or not request.follow):
                    return
                if not await query.wait(QUIET_S if has_ended and request.follow else None):
                    return
        finally:
            changes.cancel()
            del self._queries[query.query_id]
            for node, is_answering in query.nodes.items():
                if is_answering:
                    self._cancel(query.query_id, node)

    async def _wake_on_change(self, query: _Query) -> None:
        seen = self._service.changes.version
        while True:
            seen = await self._service.changes.wait(seen)
            query.wake()

    def _ask(self, query: _Query, job: JobRecord, *, follow: bool) -> None:
        """Ask the nodes of the job that were not asked yet; a replaced node is a new one."""
        request = query.request
        rank = request.rank if request.HasField("rank") else None
        places: list[NodeId | None] = list(job.nodes)
        if rank is not None:
            places = places[rank // job.plan.workers_per_node :][:1]
        if request.attempt:
            places = [*self._sessions.nodes()]
        for node in places:
            if node is None or node in query.nodes:
                continue
            question = agents_pb2.LogQuery(
                query_id=query.query_id,
                job_id=request.job_id,
                rank=rank,
                follow=follow,
                # A node that was lost from sight goes on where it was, or nearly.
                tail_bytes=1 if node in query.left else request.tail_bytes,
                attempt=request.attempt,
                timestamps=request.timestamps,
            )
            if self._sessions.send(node, agents_pb2.ControllerMessage(log_query=question)):
                query.nodes[node] = True

    def _cancel(self, query_id: str, node: NodeId) -> None:
        cancel = agents_pb2.LogQuery(query_id=query_id, cancel=True)
        self._sessions.send(node, agents_pb2.ControllerMessage(log_query=cancel))

    def _node_left(self, node: NodeId) -> None:
        for query in self._queries.values():
            query.node_left(node)
