"""A controller without servers, for benchmarks: service, journal and tables in this process.

What its loop does is counted in CPU time of its callbacks, so that a busy machine does not
change it much.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from controller.core.changes import State
from controller.core.edge.edge import Edge
from controller.core.machine import Machine
from controller.counters import Counters
from controller.diagnosis.runs import DiagnosticRuns
from controller.diagnosis.searches import FaultSearches
from controller.effects import Effects, UnmanagedCluster
from controller.rpc.jobs import JobsService
from controller.rpc.ranks import RanksService
from controller.service import Service
from controller.sessions.logs import LogQueries
from controller.sessions.session import Outgoing, Sessions
from controller.specs import settings_of
from controller.store.code import CodeStore
from controller.store.curves import Curves
from controller.store.database import Database
from controller.store.diagnoses import Diagnoses
from controller.store.history import History
from controller.store.journal import Journal
from controller.store.trends import TrendStore
from controller.trends.watch import TrendWatch
from outlast.clock import SystemClock
from outlast.ids import NodeId


@dataclass(slots=True)
class Turns:
    """CPU seconds of every callback of the event loop."""

    num: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while this is open."""
        handle = cast(Any, asyncio.events.Handle)
        run = handle._run

        def counting(this: object) -> None:
            before_s = time.process_time()
            try:
                run(this)
            finally:
                took_s = time.process_time() - before_s
                self.num += 1
                self.total_s += took_s
                self.longest_s = max(self.longest_s, took_s)

        handle._run = counting
        try:
            yield
        finally:
            handle._run = run


@dataclass(slots=True)
class Bench:
    """A controller without servers, and what its agents were told."""

    service: Service
    edge: Edge
    journal: Journal
    jobs: JobsService
    ranks: RanksService
    sessions: Sessions
    logs: LogQueries
    effects: Effects
    counters: Counters
    trends: TrendWatch
    trend_store: TrendStore
    runs: DiagnosticRuns
    database: Database
    # Nodes with the ids and kinds of what they were told, and the bytes of each message.
    commands: list[tuple[NodeId, str, str]]
    sent: list[int]
    snapshots: int = 0


@asynccontextmanager
async def controller(folder: Path) -> AsyncIterator[Bench]:
    """A controller on the journal of a folder."""
    database = Database(folder / "journal.sqlite")
    bench = _made(folder, database)
    service, journal = bench.service, bench.journal
    begin_snapshot = journal.begin_snapshot

    def counted(state: State) -> None:
        bench.snapshots += 1
        begin_snapshot(state)

    journal.begin_snapshot = counted  # type: ignore[method-assign]  # only counts
    loop = asyncio.create_task(service.run())
    loop.add_done_callback(_end_on_failure)
    beats = asyncio.create_task(_beat_all(bench))
    try:
        yield bench
    finally:
        beats.cancel()
        service.stop()
        await asyncio.gather(loop, beats, return_exceptions=True)
        database.close()


def _end_on_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        traceback.print_exception(task.exception())
        os._exit(1)


def _made(folder: Path, database: Database) -> Bench:
    clock = SystemClock()
    told: list[tuple[NodeId, str, str]] = []
    sent: list[int] = []

    def send(node: NodeId, message: Outgoing) -> bool:
        # As the stream of an agent would.
        made = message() if callable(message) else message
        sent.append(len(made.SerializeToString()))
        told.append((node, made.command.command_id, str(made.command.WhichOneof("kind"))))
        return True

    journal = Journal(database, clock)
    journal.take_over()
    machine = Machine(journal.load())
    sessions, counters = Sessions(), Counters()
    edge = Edge(machine.state, settings_of)
    runs = DiagnosticRuns(sessions, Diagnoses(database), clock, counters)
    effects = Effects(send, UnmanagedCluster(), FaultSearches(runs))
    service = Service(
        machine=machine,
        journal=journal,
        curves=Curves(database),
        history=History(database),
        edge=edge,
        effects=effects,
        clock=clock,
    )
    trend_store = TrendStore(database)
    logs, code = LogQueries(service, sessions, edge), CodeStore(folder / "code")
    return Bench(
        service=service,
        edge=edge,
        journal=journal,
        jobs=JobsService(service, sessions, edge, logs, folder.as_uri(), code, {}),
        ranks=RanksService(service, edge, logs),
        sessions=sessions,
        logs=logs,
        effects=effects,
        counters=counters,
        trends=TrendWatch(service, edge, trend_store),
        trend_store=trend_store,
        runs=runs,
        database=database,
        commands=told,
        sent=sent,
    )


async def _beat_all(bench: Bench) -> None:
    """Every node is heard twice a second: what waits in sockets is read when the loop can."""
    loop = asyncio.get_running_loop()
    while True:
        for node in bench.service.state.nodes:
            bench.service.post(*bench.edge.heard(node, loop.time()))
        await asyncio.sleep(0.5)
