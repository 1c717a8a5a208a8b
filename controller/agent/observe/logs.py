"""Answers log queries from the files that workers write.

A query names a job and perhaps a rank or an attempt. It gets the end of that or the
newest attempt's logs and, when it follows, everything written after, later attempts
included unless it named one, until it is cancelled, its connection ends or the job is
forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path

from google.protobuf.message import Message

from controller.agent.observe.log_files import read_log
from controller.agent.observe.log_sources import (
    Source,
    first_line,
    newest_attempt,
    rest,
    search,
    sources,
    timed,
)
from controller.agent.observe.log_times import LogTimes
from controller.agent.observe.rank_times import measured_times, rank_times
from controller.agent.session import SessionLostError
from controller.agent.workers import profiles, stacks
from controller.agent.workers.worker import Worker
from outlast.patterns import LinePattern
from outlast.trace.heat import Measure
from outlast.v1 import agents_pb2
from outlast.worker_contract import WorkerFiles

logger = logging.getLogger(__name__)

DEFAULT_TAIL_BYTES = 64 * 1024
MAX_TAIL_BYTES = 16 * 2**20
CHUNK_BYTES = 64 * 1024
# At a time, each by a process beside those that train: all ranks of a node, once.
MAX_RECORDINGS = 8
# Characters of the stacks of one rank.
_MAX_STACKS = 128 * 1024
# Files have no way to wake a reader short of inotify, which network file systems lack.
FOLLOW_PERIOD_S = 0.1

Send = Callable[[agents_pb2.AgentMessage], Awaitable[None]]


class Logs:
    """Log queries that are being answered."""

    def __init__(
        self,
        jobs_dir: Path,
        send: Send,
        max_queries: int,
        running: Callable[[], Iterable[Worker]] = tuple,
    ) -> None:
        """`running` are the workers of this node that have not ended."""
        self._jobs_dir = jobs_dir
        self._send = send
        self._max_queries = max_queries
        self._running = running
        self._queries: dict[str, asyncio.Task[None]] = {}
        # Of queries, those for which a rank is being recorded.
        self._recordings: set[str] = set()

    def query(self, query: agents_pb2.LogQuery) -> None:
        """Start answering a query, or stop answering it."""
        running = self._queries.pop(query.query_id, None)
        if running is not None:
            running.cancel()
        if query.cancel:
            return
        if len(self._queries) >= self._max_queries:
            # Not one that has been recording for somebody, if there is another.
            others = (each for each in self._queries if each not in self._recordings)
            oldest = next(others, next(iter(self._queries)))
            logger.warning("too many log queries: %s is dropped", oldest)
            self._queries.pop(oldest).cancel()
            # Its reader waits for the end, and it may be the last one to be asked.
            self._begin(oldest, self._send_end(oldest))
        self._begin(query.query_id, self._answer(query))

    def cancel_all(self) -> None:
        """Nobody listens any more."""
        for task in self._queries.values():
            task.cancel()
        self._queries.clear()

    def _begin(self, query_id: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"logs-{query_id}")
        self._queries[query_id] = task
        task.add_done_callback(lambda done: self._done(query_id, done))

    def _done(self, query_id: str, task: asyncio.Task[None]) -> None:
        if self._queries.get(query_id) is task:
            del self._queries[query_id]
        if not task.cancelled() and task.exception() is not None:
            logger.warning("log query %s failed: %s", query_id, task.exception())

    async def _answer(self, query: agents_pb2.LogQuery) -> None:
        try:
            await self._send_logs(query)
        except SessionLostError:
            return
        except (OSError, ValueError) as error:
            logger.warning("log query %s ends early: %s", query.query_id, error)
        await self._send_end(query.query_id)

    async def _send_end(self, query_id: str) -> None:
        end = agents_pb2.LogChunk(query_id=query_id, end=True)
        with contextlib.suppress(SessionLostError):
            await self._send(agents_pb2.AgentMessage(log_chunk=end))

    async def _send_logs(self, query: agents_pb2.LogQuery) -> None:
        job_dir = self._jobs_dir / query.job_id
        # A job id comes from the network: it must not name a folder elsewhere.
        if job_dir.parent != self._jobs_dir or query.job_id in ("", ".", ".."):
            job_dir = self._jobs_dir / "no such job"
        rank = query.rank if query.HasField("rank") else None
        if query.stacks:
            await self._send_stacks(query, rank)
            return
        if query.HasField("recording"):
            await self._send_profiles(query, rank)
            return
        after = 0 if query.all_attempts else (query.attempt or newest_attempt(job_dir)) - 1
        found = {
            source.path: source
            for source in sources(job_dir, _ranks_of(query), after_attempt=after)
            if query.attempt in (0, source.attempt)
        }
        if query.times:
            await self._send_times(query, list(found.values()))
            return
        await _OneReader(query, self._send).read(job_dir, _ranks_of(query), after, found)

    async def _send_times(self, query: agents_pb2.LogQuery, sources: list[Source]) -> None:
        # One that this version does not know is the controller's to make of all times.
        measure = Measure(query.measure) if query.measure in [*Measure] else None
        within = range(query.first_step, query.last_step + 1) if query.last_step > 0 else None
        for source in sources:
            path = WorkerFiles.below(source.path.parent, source.rank).blackbox
            if measure is None:
                since_ns = round(query.since_s * 1e9)
                times = await asyncio.to_thread(rank_times, path, within, since_ns)
            else:
                times = await asyncio.to_thread(measured_times, path, measure, query.most_steps)
            if times is not None:
                await self._send_one(query, source, times)

    async def _send_stacks(self, query: agents_pb2.LogQuery, rank: int | None) -> None:
        for worker, found in await stacks.look(self._running_of(query, rank), native=query.native):
            found.text = found.text[:_MAX_STACKS]
            await self._send_one(query, worker, found)

    async def _send_profiles(self, query: agents_pb2.LogQuery, rank: int | None) -> None:
        for worker in self._running_of(query, rank):
            if len(self._recordings) >= MAX_RECORDINGS:
                why = f"{MAX_RECORDINGS} ranks of its node are being recorded; try again"
                found = agents_pb2.RankProfile(problem=why)
            else:
                self._recordings.add(query.query_id)
                try:
                    found = await profiles.record(worker, query.recording, native=query.native)
                finally:
                    self._recordings.discard(query.query_id)
            await self._send_one(query, worker, found)

    def _running_of(self, query: agents_pb2.LogQuery, rank: int | None) -> list[Worker]:
        return [
            each
            for each in self._running()
            if each.job_id == query.job_id and each.pid and rank in (None, each.rank)
        ]

    async def _send_one(
        self, query: agents_pb2.LogQuery, of: Source | Worker, found: Message
    ) -> None:
        """What was found of one rank, in one chunk."""
        chunk = agents_pb2.LogChunk(
            query_id=query.query_id,
            rank=of.rank,
            attempt=of.attempt,
            data=found.SerializeToString(),
        )
        await self._send(agents_pb2.AgentMessage(log_chunk=chunk))


class _OneReader:
    """Sends what one query asks for of some logs."""

    def __init__(self, query: agents_pb2.LogQuery, send: Send) -> None:
        self._query = query
        self._send = send
        # The controller has looked at it; an error here ends the query.
        self._pattern = LinePattern(query.grep, "grep") if query.grep else None

    async def read(
        self, job_dir: Path, ranks: range | None, after: int, found: dict[Path, Source]
    ) -> None:
        """Send what there is and, when it is followed, what comes until the job is forgotten.

        `found` are the logs of the attempts after `after`.
        """
        query = self._query
        for source in found.values():
            source.offset = await asyncio.to_thread(self._begin, source)
        for source in found.values():
            await self._send_new(source, most_bytes=MAX_TAIL_BYTES)
            await self._send_rest(source)
        while query.follow:
            await asyncio.sleep(FOLLOW_PERIOD_S)
            if found and not job_dir.exists():
                break
            newest = max((source.attempt for source in found.values()), default=0)
            for source in sources(job_dir, ranks, after_attempt=max(newest - 1, after)):
                if query.attempt in (0, source.attempt):
                    found.setdefault(source.path, source)
            for source in found.values():
                await self._send_new(source)

    def _begin(self, source: Source) -> int:
        """Where in a log the first thing stands that is sent."""
        query = self._query
        size = source.path.stat().st_size
        is_selected = bool(query.grep or query.since_s)
        wanted = min(query.tail_bytes or DEFAULT_TAIL_BYTES, MAX_TAIL_BYTES)
        if is_selected and not query.tail_bytes:
            # A search reads all of it and sends little.
            wanted = size if query.grep else MAX_TAIL_BYTES
        at_least = max(0, size - wanted)
        return first_line(source.path, at_least, query.since_s) if is_selected else at_least

    async def _send_new(self, source: Source, most_bytes: int = sys.maxsize) -> None:
        """What is new in a log, unless it is more than that."""
        while True:
            if self._pattern is None:
                source.offset, data = read_log(source.path, source.offset, CHUNK_BYTES)
                pieces = _timed(source, data, is_wanted=self._query.timestamps)
                source.offset += len(data)
                is_more = bool(data)
            else:
                is_more, lines = await asyncio.to_thread(search, source, self._pattern)
                pieces = timed(source, lines)
            if not is_more:
                return
            await self._send_pieces(source, pieces)
            if self._pattern is not None and source.sent_bytes > most_bytes:
                left_out = (
                    f"[outlast] more than {most_bytes >> 20} MiB match; the rest is not sent\n"
                )
                await self._send_pieces(source, [(left_out.encode(), 0.0)])
                source.offset, source.begun = source.path.stat().st_size, b""
                return

    async def _send_rest(self, source: Source) -> None:
        """The line that a log ends in, which nothing follows any more."""
        if self._pattern is not None and not self._query.follow:
            await self._send_pieces(source, timed(source, rest(source, self._pattern)))

    async def _send_pieces(self, source: Source, pieces: Iterable[tuple[bytes, float]]) -> None:
        query = self._query
        for piece, at_s in pieces:
            source.sent_bytes += len(piece)
            chunk = agents_pb2.LogChunk(
                query_id=query.query_id,
                rank=source.rank,
                attempt=source.attempt,
                data=piece,
                at_s=at_s if query.timestamps else 0.0,
                is_selected=True,
            )
            await self._send(agents_pb2.AgentMessage(log_chunk=chunk))


def _ranks_of(query: agents_pb2.LogQuery) -> range | None:
    """None for all."""
    if not query.HasField("rank"):
        return None
    return range(query.rank, query.rank + max(1, query.num_ranks))


def _timed(source: Source, data: bytes, *, is_wanted: bool) -> Iterable[tuple[bytes, float]]:
    if not is_wanted:
        return ((data, 0.0),)
    return LogTimes(source.path).pieces(source.offset, data)
