"""A whole controller without a network: agents' streams are plain iterators."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from controller.clock import SteadyClock
from controller.convert import plan_of
from controller.core.edge.edge import Edge
from controller.core.edge.rules import MAX_COUNT
from controller.core.events import JobResumeRequested, JobSubmitted
from controller.core.machine import Machine
from controller.core.settings import Settings
from controller.core.states import TERMINAL, JobState
from controller.counters import Counters
from controller.diagnosis.runs import DiagnosticRuns
from controller.diagnosis.searches import FaultSearches
from controller.effects import Effects, UnmanagedCluster
from controller.rpc.job_views import JobViews
from controller.service import Service
from controller.sessions.agents import AgentsService
from controller.sessions.incoming import Incoming
from controller.sessions.logs import LogQueries
from controller.sessions.session import Sessions
from controller.specs import settings_of
from controller.store.curves import Curves
from controller.store.database import Database
from controller.store.diagnoses import Diagnoses
from controller.store.history import History
from controller.store.journal import Journal
from controller.store.trends import TrendStore
from controller.trends.watch import TrendWatch
from controller.web.metrics import ControllerMetrics
from controller.web.metrics.sources import Sources
from outlast.ids import JobId
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2
from tests.controller.edge.mutants import Sender, mutate
from tests.controller.fakes import spec_document

# Sent between two looks at whether everything was taken in.
ROUND = 500


class RefusedError(Exception):
    """The controller ended the call."""


class _Context:
    """What a servicer needs of a call."""

    async def abort(self, code: object, message: str, trailing: object = ()) -> None:
        raise RefusedError(message)

    def peer(self) -> str:
        return "test"


class Stream:
    """One agent: answers commands as a healthy one, and sends what a test gives it."""

    def __init__(self, bench: Bench, node: str) -> None:
        self.sender = Sender(node)
        self.num_sessions = 0
        self.num_taken = 0
        self.reports_progress = True
        self._bench = bench
        self._up: asyncio.Queue[agents_pb2.AgentMessage] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())

    def send(self, message: agents_pb2.AgentMessage) -> None:
        self._up.put_nowait(message)

    @property
    def waiting(self) -> int:
        return self._up.qsize()

    async def rejoin(self) -> None:
        """Come back as a new process."""
        await self.stop()
        before = self.num_sessions
        # Its events are numbered from one again.
        self.sender.incarnation = f"{self.sender.node}x{before + 1}"
        self.sender.seq = 0
        self._task = asyncio.create_task(self._run())
        while self.num_sessions == before:
            await asyncio.sleep(0)

    def has_ended(self) -> bool:
        """Whether the controller's end has failed."""
        return self._task.done()

    async def wait(self) -> None:
        """Raise what the controller's end has failed with."""
        await self._task

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            with suppress(RefusedError):
                await self._session()
            await asyncio.sleep(0)

    async def _session(self) -> None:
        self.num_sessions += 1
        self._up = asyncio.Queue()
        self.send(self.sender.hello())
        answers = self._bench.agents.Session(self._requests(self._up), _Context())  # type: ignore[arg-type]
        async for message in answers:
            if message.HasField("command"):
                kind = message.command.WhichOneof("kind")
                self.send(self.sender.answer(message.command))
                if kind == "start_workers" and self.reports_progress:
                    self.send(self.sender.progress(1))

    async def _requests(
        self, up: asyncio.Queue[agents_pb2.AgentMessage]
    ) -> AsyncIterator[agents_pb2.AgentMessage]:
        while True:
            message = await up.get()
            self.num_taken += 1
            yield message


class Bench:
    """The parts of a controller, and its streams."""

    def __init__(self, database: Database, clock: SteadyClock) -> None:
        self.journal = Journal(database, clock)
        self.journal.take_over()
        settings = Settings(reconcile_s=0.0, cooldown_s=0.0, suspect_s=0.0)
        machine = Machine(self.journal.load(), settings)
        self.edge = Edge(machine.state, settings_of)
        sessions, counters = Sessions(), Counters()
        self.sessions = sessions
        self.incoming = Incoming(machine.state)
        runs = DiagnosticRuns(sessions, Diagnoses(database), clock, counters)
        searches = FaultSearches(runs)
        effects = Effects(sessions.send, UnmanagedCluster(), searches)
        self.service = Service(
            machine=machine,
            journal=self.journal,
            curves=Curves(database),
            history=History(database),
            edge=self.edge,
            effects=effects,
            clock=clock,
        )
        searches.report_to(self.service)
        self.agents = AgentsService(
            service=self.service,
            sessions=sessions,
            edge=self.edge,
            logs=LogQueries(self.service, sessions, self.edge),
            runs=runs,
            counters=counters,
            incoming=self.incoming,
        )
        self.metrics = ControllerMetrics()
        self.metrics.read_from(
            Sources(
                service=self.service,
                edge=self.edge,
                sessions=sessions,
                effects=effects,
                counters=counters,
                incoming=self.incoming,
                clock=clock,
                trends=TrendWatch(self.service, self.edge, TrendStore(database)),
            )
        )
        self.streams: list[Stream] = []
        self.loop = asyncio.create_task(self.service.run())
        self._num_jobs = 0

    def connect(self, *nodes: str) -> None:
        self.streams += [Stream(self, node) for node in nodes]

    async def keep_training(self) -> None:
        """See to it that some job trains, as a user would."""
        jobs = list(self.service.state.jobs.values())
        live = [job for job in jobs if job.state not in TERMINAL]
        for job in live:
            if job.state is JobState.PAUSED:
                await self.service.tell(JobResumeRequested(job_id=job.job_id))
        if not live:
            spec = parse_spec(
                spec_document(recovery={"retry_budget": 1_000, "in_place_restarts": 1_000})
            )
            self._num_jobs += 1
            await self.service.tell(
                JobSubmitted(
                    job_id=JobId(f"tiny-{self._num_jobs:06d}"),
                    name="tiny",
                    request_id=f"r{self._num_jobs}",
                    spec_json=spec.canonical_json(),
                    checkpoint_url="file:///nowhere",
                    plan=plan_of(spec),
                )
            )

    async def settle(self) -> None:
        """Wait until what was sent has been taken in."""
        for _ in range(100_000):
            if self.loop.done() or not any(stream.waiting for stream in self.streams):
                break
            await asyncio.sleep(0)

    def look(self) -> None:
        """What people and programs ask for must be there, too."""
        for family in self.metrics.collect():
            assert family.name
        views = JobViews(self.service, self.edge, {})
        now_s = asyncio.get_running_loop().time()
        for job in self.service.state.jobs.values():
            assert views.fresh(job, now_s).whole().SerializeToString()

    @property
    def num_taken(self) -> int:
        return sum(stream.num_taken for stream in self.streams)

    async def torment(self, number: int, choice: random.Random) -> None:
        """Have so many messages taken in, most of which are wrong in one or more places."""
        wanted = self.num_taken + number
        while self.num_taken < wanted:
            for _ in range(ROUND):
                stream = choice.choice(self.streams)
                message = stream.sender.any(choice)
                for _ in range(choice.choice((0, 1, 1, 1, 2, 4))):
                    mutate(message, choice)
                stream.send(message)
                # Numbers go on from the highest that counted; there is nothing above the last.
                if message.event.seq <= MAX_COUNT:
                    stream.sender.seq = max(stream.sender.seq, message.event.seq)
            await self.settle()
            if self.loop.done():
                self.loop.result()
            for stream in self.streams:
                if stream.sender.seq > MAX_COUNT - 10 * ROUND or choice.random() < 0.02:
                    await stream.rejoin()
            await self.keep_training()


@asynccontextmanager
async def bench(folder: Path, clock: SteadyClock | None = None) -> AsyncIterator[Bench]:
    """A controller with three nodes, one more than its job needs."""
    database = Database(folder / "journal.sqlite")
    try:
        found = Bench(database, clock or SteadyClock())
        found.connect("n0", "n1", "n2")
        try:
            await found.keep_training()
            yield found
        finally:
            for stream in found.streams:
                await stream.stop()
            found.service.stop()
            await found.loop
    finally:
        database.close()
