"""Logs of workers: asked of the agents of a job, merged into one stream.

The chunks come over the same streams as heartbeats, so a reader that is slow
must never hold one up: it is dropped when too much waits for it. What a node
that does not answer costs is in `log_query`.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence

from controller.core.edge.edge import Edge
from controller.core.incident_record import IncidentRecord
from controller.core.kinds import EvidenceKind
from controller.core.records import JobRecord
from controller.core.states import TERMINAL
from controller.service import Service
from controller.sessions.log_query import LogQuery, NodeView, Ranks
from controller.sessions.session import Sessions
from outlast.errors import RetryableError
from outlast.ids import JobId, NodeId
from outlast.v1 import agents_pb2, jobs_pb2

MAX_QUERIES = 256
# After the end of a job its agents send the rest of its logs within a fraction of this.
QUIET_S = 1.0
# So often it is looked which nodes do not answer.
LOOK_S = 1.0


class SlowReaderError(RetryableError):
    """A reader of logs fell too far behind."""


class TooManyQueriesError(RetryableError):
    """As many logs are being read as may be."""


class LogQueries:
    """The readers of logs, and the routing of what agents answer."""

    def __init__(self, service: Service, sessions: Sessions, edge: Edge) -> None:
        self._service = service
        self._sessions = sessions
        self._edge = edge
        self._queries: dict[str, LogQuery] = {}
        sessions.on_closed(self._node_left)

    def deliver(self, node: NodeId, chunk: agents_pb2.LogChunk) -> None:
        """A piece of a log from an agent."""
        query = self._queries.get(chunk.query_id)
        if query is None:
            # Whoever asked has gone: the agent need not go on.
            self._cancel(chunk.query_id, node)
        elif not query.was_asked(node):
            return  # It was not asked, or has left since.
        elif query.is_selective and chunk.data and not chunk.is_selected:
            # All it has would travel here.
            query.refuse(node, "its agent is of an older version, which cannot search")
            self._cancel(chunk.query_id, node)
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

    async def read(
        self,
        request: jobs_pb2.LogsRequest,
        *,
        kind: agents_pb2.LogQuery | None = None,
        node_stride: int = 1,
    ) -> AsyncGenerator[jobs_pb2.LogsResponse]:
        """Logs of a job that exists, until they end; when followed, until the job ends.

        Where `kind` has `times` the data of each response is a `RankTimes` of a rank instead, where
        it has `stacks` a `RankStacks`, and where it has a `recording` a `RankProfile`.

        Of `node_stride` nodes of the present attempt one is asked. One that does not answer has a
        response of its own in the place of its ranks (`missing`).

        Raises:
            SlowReaderError: the caller takes them too slowly.
            TooManyQueriesError: others must end first.
        """
        query = self._opened(request, kind, node_stride)
        job_id = JobId(request.job_id)
        changes = asyncio.create_task(self._wake_on_change(query))
        clock_s = asyncio.get_running_loop().time
        ended_s = math.inf
        try:
            while True:
                job = self._service.state.jobs[job_id]
                if job.state in TERMINAL:
                    ended_s = min(ended_s, clock_s())
                is_followed = request.follow and math.isinf(ended_s)
                self._ask(query, job, is_followed=is_followed)
                self._look(query, clock_s(), is_followed=is_followed)
                self._note_lost(query, job)
                while query.chunks:
                    yield query.take()
                if query.is_too_slow:
                    raise SlowReaderError("the logs come faster than they are read")
                if not is_followed and not query.answering():
                    return
                if request.follow and query.is_quiet_since(ended_s, QUIET_S):
                    return
                await query.wait(LOOK_S)
        finally:
            changes.cancel()
            del self._queries[query.query_id]
            for node in query.answering():
                self._cancel(query.query_id, node)

    def _opened(
        self, request: jobs_pb2.LogsRequest, kind: agents_pb2.LogQuery | None, node_stride: int
    ) -> LogQuery:
        if len(self._queries) >= MAX_QUERIES:
            raise TooManyQueriesError(f"{MAX_QUERIES} logs are being read already")
        query = LogQuery(request, uuid.uuid4().hex, kind=kind, node_stride=node_stride)
        self._queries[query.query_id] = query
        if not request.follow and not request.attempt and not request.all_attempts:
            job = self._service.state.jobs[JobId(request.job_id)]
            query.note_unplaced(_unplaced(query, job))
        return query

    async def _wake_on_change(self, query: LogQuery) -> None:
        seen = self._service.changes.version
        while True:
            seen = await self._service.changes.wait(seen)
            query.wake()

    def _ask(self, query: LogQuery, job: JobRecord, *, is_followed: bool) -> None:
        """Ask the nodes that were not asked yet; a replaced node is a new one."""
        request = query.request
        query.wanted = self._wanted(query, job)
        for node in query.wanted:
            if query.was_asked(node):
                continue
            question = agents_pb2.LogQuery(
                query_id=query.query_id,
                job_id=request.job_id,
                rank=request.rank if request.HasField("rank") else None,
                follow=is_followed,
                # A node that was lost from sight goes on where it was, or nearly.
                tail_bytes=1 if node in query.left else request.tail_bytes,
                attempt=request.attempt,
                timestamps=request.timestamps,
                since_s=0.0 if node in query.left else request.since_s,
                grep=request.grep,
                # Of a node that comes back only what is new.
                all_attempts=request.all_attempts and node not in query.left,
            )
            question.MergeFrom(query.kind)
            if self._sessions.send(node, agents_pb2.ControllerMessage(log_query=question)):
                query.asked(node)

    def _look(self, query: LogQuery, now_s: float, *, is_followed: bool) -> None:
        """Tell the reader who does not answer."""
        if now_s < query.look_at_s:
            return
        query.look_at_s = now_s + LOOK_S
        views = {
            node: NodeView(
                is_connected=self._sessions.is_connected(node),
                heard_s=self._edge.heard_s(node),
                is_late=self._edge.is_late(node),
            )
            for node in dict.fromkeys([*query.wanted, *query.answering()])
        }
        for node in query.note_missing(views, is_followed=is_followed):
            self._cancel(query.query_id, node)

    def _wanted(self, query: LogQuery, job: JobRecord) -> dict[NodeId, Ranks]:
        """Where the logs should be, and of which ranks as far as that is known."""
        request = query.request
        found = _ranks_by_node(query, job.nodes, job.plan.workers_per_node)
        if not request.attempt and not request.all_attempts:
            return found
        # It may have run on nodes that the job has no more, or elsewhere on these.
        known = found if request.attempt in (0, job.attempt) else {}
        record = self._service.state.attempts.get(job.job_id)
        if record is not None and request.attempt in (0, record.attempt):
            began = _ranks_by_node(query, record.nodes, record.workers_per_node)
            known = began if request.attempt else {**began, **known}
        # Which ranks a node had that was lost is not known: of one rank see `_note_lost`.
        lost = () if request.HasField("rank") else self._lost(query, job)
        asked = (*known, *found, *lost, *self._sessions.nodes())
        return {node: known.get(node, range(0)) for node in asked}

    def _lost(self, query: LogQuery, job: JobRecord) -> list[NodeId]:
        """Nodes that were lost to the earlier attempts whose logs are read."""
        state, wanted = self._service.state, query.request.attempt
        record = state.attempts.get(job.job_id)
        if query.kind.ByteSize() or (record is not None and wanted == record.attempt):
            return []
        incidents = (each for each in state.incidents_of(job) if wanted in (0, each.attempt))
        return list(dict.fromkeys(node for each in incidents for node in _lost_in(each)))

    def _note_lost(self, query: LogQuery, job: JobRecord) -> None:
        """Once all that are connected have answered: one rank's logs may be on a lost node."""
        request = query.request
        is_of_one = request.HasField("rank") and request.attempt and not request.follow
        # Of what is searched for there may be none.
        if not is_of_one or query.is_selective or query.answering() or query.has_put:
            return
        away = [node for node in self._lost(query, job) if not self._sessions.is_connected(node)]
        if away:
            which = f"{away[0]} or {len(away) - 1} more" if len(away) > 1 else away[0]
            why = f"no connected node has any; they may be on {which}, lost since then"
            query.note_away(range(request.rank, request.rank + 1), why)

    def _cancel(self, query_id: str, node: NodeId) -> None:
        cancel = agents_pb2.LogQuery(query_id=query_id, cancel=True)
        self._sessions.send(node, agents_pb2.ControllerMessage(log_query=cancel))

    def _node_left(self, node: NodeId) -> None:
        for query in self._queries.values():
            query.node_left(node)


def _lost_in(incident: IncidentRecord) -> Iterator[NodeId]:
    yield from incident.culprits
    for each in incident.evidence:
        if each.node is not None and each.kind in (EvidenceKind.NODE_LOST, EvidenceKind.NODE_LEFT):
            yield each.node


def _ranks_by_node(
    query: LogQuery, nodes: Sequence[NodeId | None], workers_per_node: int
) -> dict[NodeId, Ranks]:
    """The nodes that a question is about, of those in the order of ranks, with their ranks."""
    found = _ranks_by_node_index(query, len(nodes), workers_per_node)
    placed = ((nodes[node_index], ranks) for node_index, ranks in found)
    return {node: ranks for node, ranks in placed if node is not None}


def _ranks_by_node_index(
    query: LogQuery, num_nodes: int, per_node: int
) -> Iterator[tuple[int, Ranks]]:
    """Index of each node that a question is about, with the ranks there."""
    first, last = 0, per_node * num_nodes
    if query.request.HasField("rank"):
        first = query.request.rank
        last = min(last, first + max(1, query.kind.num_ranks))
    for node_index in range(first // per_node, -(-last // per_node), query.node_stride):
        there = range(node_index * per_node, (node_index + 1) * per_node)
        yield node_index, range(max(first, there.start), min(last, there.stop))


def _unplaced(query: LogQuery, job: JobRecord) -> list[Ranks]:
    """Ranks that have no node at present."""
    per_node = job.plan.workers_per_node
    return [
        ranks
        for node_index, ranks in _ranks_by_node_index(query, len(job.nodes), per_node)
        if job.nodes[node_index] is None
    ]
