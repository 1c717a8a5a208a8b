"""One reader of logs: the nodes that it waits for, and what is missing of them.

A node that does not answer must not keep the logs of all others from a reader: after
`ANSWER_S` without a word it is given up, and the reader gets its ranks and the reason in the
place of their logs. While logs are followed nobody is given up; it is said who is silent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outlast.ids import NodeId
from outlast.v1 import agents_pb2, jobs_pb2

# Of one reader, waiting to be sent. A tail of 16 MiB from a few ranks fits, and 1,000 steps of
# 10,000 ranks for a heat map, 7 kB of each, where all agents answer at once.
MAX_WAITING_BYTES = 96 * 2**20
# A node that sends neither logs nor anything else for so long is given up. Logs come within a
# fraction of a second; an agent on a machine that is overloaded takes a few.
ANSWER_S = 5.0
# One whose heartbeats come, too: a disk that reads slowly, or an agent that lost the question.
ANSWER_LIMIT_S = 30.0

Ranks = range
_UNKNOWN = range(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What is known of a node besides its logs."""

    is_connected: bool
    # By the clock of the loop; None when it is not watched.
    heard_s: float | None
    is_late: bool


@dataclass(slots=True, kw_only=True)
class _Asked:
    """A node that was asked."""

    heard_s: float
    is_answering: bool = True
    is_refused: bool = False


class LogQuery:
    """What a reader has been sent, and from whom more is to come."""

    def __init__(
        self,
        request: jobs_pb2.LogsRequest,
        query_id: str,
        *,
        kind: agents_pb2.LogQuery | None = None,
        node_stride: int = 1,
    ) -> None:
        """`kind` says what is asked for, where it is not logs.

        Of `node_stride` nodes of the present attempt one is asked.
        """
        self.request = request
        self.kind = kind or agents_pb2.LogQuery()
        self.node_stride = node_stride
        self._answer_limit_s = ANSWER_LIMIT_S + self.kind.recording.seconds
        self.query_id = query_id
        # Nodes whose session ended while they were followed: asked again when they are back.
        self.left: dict[NodeId, None] = {}
        self.chunks: deque[jobs_pb2.LogsResponse] = deque()
        self.is_too_slow = False
        # When the last piece came.
        self.put_s = _now_s()
        # When it is due to look who does not answer.
        self.look_at_s = self.put_s
        # Where the logs should be, with the ranks there as far as they are known.
        self.wanted: Mapping[NodeId, Ranks] = {}
        self._asked: dict[NodeId, _Asked] = {}
        # Wanted and not connected, and since when.
        self._away: dict[NodeId, float] = {}
        # Nodes of which the reader already knows that something is missing.
        self._missing: dict[NodeId, None] = {}
        # Whether anything has come.
        self.has_put = False
        self._waiting_bytes = 0
        self._ready = asyncio.Event()

    @property
    def is_selective(self) -> bool:
        """Whether nodes are to send a part of the logs only, which older agents cannot tell."""
        request = self.request
        return bool(request.grep or request.since_s or request.all_attempts)

    def wake(self) -> None:
        """Have whoever waits look again."""
        self._ready.set()

    async def wait(self, timeout_s: float) -> None:
        """Wait until there may be something new."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return
        self._ready.clear()

    def asked(self, node: NodeId) -> None:
        """The node was sent the question."""
        self._asked[node] = _Asked(heard_s=_now_s())
        self._away.pop(node, None)

    def was_asked(self, node: NodeId) -> bool:
        return node in self._asked

    def answering(self) -> list[NodeId]:
        """Nodes from which something may still come."""
        return [node for node, asked in self._asked.items() if asked.is_answering]

    def put(self, chunk: jobs_pb2.LogsResponse) -> None:
        """A piece of a log of a node that was asked."""
        node = NodeId(chunk.node)
        self._asked[node].heard_s = self.put_s = _now_s()
        self._missing.pop(node, None)
        self.has_put = True
        if self._waiting_bytes + len(chunk.data) > MAX_WAITING_BYTES:
            self.is_too_slow = True
        else:
            self.chunks.append(chunk)
            self._waiting_bytes += len(chunk.data)
        self.wake()

    def is_quiet_since(self, ended_s: float, quiet_s: float) -> bool:
        """Whether nothing has come for so long since the end of the job: agents that follow do
        not say that it was all."""
        return _now_s() - max(ended_s, self.put_s) >= quiet_s

    def take(self) -> jobs_pb2.LogsResponse:
        """The oldest piece that has not been sent."""
        chunk = self.chunks.popleft()
        self._waiting_bytes -= len(chunk.data)
        return chunk

    def ended(self, node: NodeId) -> None:
        """The node has sent all."""
        asked = self._asked.get(node)
        if asked is not None and not asked.is_refused:
            asked.is_answering = False
            self._say_it_is_back(node)
            self.wake()

    def refuse(self, node: NodeId, why: str) -> None:
        """Drop everything from this node, and tell the reader why."""
        self._asked[node].is_answering = False
        self._asked[node].is_refused = True
        self._say_it_is_missing(node, why)
        self.wake()

    def node_left(self, node: NodeId) -> None:
        """The node's session has ended; its answer will not."""
        asked = self._asked.pop(node, None)
        if asked is None:
            return
        if self.request.follow:
            self.left[node] = None
        elif asked.is_answering:
            self._say_it_is_missing(node, "its agent left before it had sent all")
            self._asked[node] = _Asked(heard_s=asked.heard_s, is_answering=False)
        else:
            self._asked[node] = asked
        self.wake()

    def note_unplaced(self, ranks: Iterable[Ranks]) -> None:
        """Tell the reader of ranks that have no node."""
        for each in ranks:
            self._put_missing(NodeId(""), "the job has no node for them at present", each)

    def note_away(self, ranks: Ranks, why: str) -> None:
        """Tell the reader of ranks that no node that was asked has."""
        self._put_missing(NodeId(""), why, ranks)

    def note_missing(self, views: Mapping[NodeId, NodeView], *, is_followed: bool) -> list[NodeId]:
        """Tell the reader what is missing by now; nodes that are given up."""
        given_up = []
        for node, view in views.items():
            asked = self._asked.get(node)
            why = self._why_missing(node, view, is_followed=is_followed)
            if why:
                self._say_it_is_missing(node, why)
                if asked is not None and not is_followed:
                    asked.is_answering = False
                    given_up.append(node)
            elif is_followed and asked is not None and view.heard_s is not None:
                self._say_it_is_back(node)
        return given_up

    def _why_missing(self, node: NodeId, view: NodeView, *, is_followed: bool) -> str:
        now_s = _now_s()
        asked = self._asked.get(node)
        if asked is None:
            away_s = now_s - self._away.setdefault(node, now_s)
            # Whoever follows can wait for an agent that connects again.
            is_gone = not is_followed or away_s >= ANSWER_S
            return "it is not connected" if is_gone and not view.is_connected else ""
        if not asked.is_answering:
            return ""
        heard_s = max(asked.heard_s, view.heard_s or 0.0)
        silence = f"nothing was heard of it for {now_s - heard_s:.0f} s"
        if is_followed:
            return silence if view.is_late else ""
        if now_s - heard_s >= ANSWER_S:
            return silence
        if now_s - asked.heard_s >= self._answer_limit_s:
            return f"it did not answer within {self._answer_limit_s:.0f} s"
        return ""

    def _say_it_is_missing(self, node: NodeId, why: str) -> None:
        if node not in self._missing:
            self._missing[node] = None
            self._put_missing(node, why, self.wanted.get(node, _UNKNOWN))

    def _say_it_is_back(self, node: NodeId) -> None:
        if node in self._missing:
            del self._missing[node]
            self._put_missing(node, "", self.wanted.get(node, _UNKNOWN))

    def _put_missing(self, node: NodeId, why: str, ranks: Ranks) -> None:
        missing = jobs_pb2.MissingLogs(
            reason=why, first_rank=min(ranks, default=0), num_ranks=len(ranks)
        )
        self.chunks.append(jobs_pb2.LogsResponse(node=node, missing=missing))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
