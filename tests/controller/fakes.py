"""An agent without workers, over real gRPC, and a controller in this process to talk to."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio

from controller import app, join_token
from controller.core.settings import Settings
from controller.notify.settings import NOBODY, Notify
from controller.options import Options
from controller.rpc.views import struct_of
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2, common_pb2, jobs_pb2
from outlast.v1.agents_pb2_grpc import AgentsStub
from outlast.v1.jobs_pb2_grpc import JobsStub

DEADLINE_S = 60.0


async def until(condition: Callable[[], bool], what: str, *, within_s: float = DEADLINE_S) -> None:
    """Wait for a condition, looking often."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never happened: {what}"
        await asyncio.sleep(0.002)


def spec_document(**changes: object) -> dict[str, object]:
    """A job of two nodes with one rank each."""
    document: dict[str, object] = {
        "name": "tiny",
        "steps": 10,
        "parallel": {"dp": 2},
        "resources": {"workers_per_node": 1},
    }
    document.update(changes)
    return document


def submit_request(request_id: str = "", **changes: object) -> jobs_pb2.SubmitRequest:
    """A valid spec, ready to be submitted."""
    spec = parse_spec(spec_document(**changes))
    return jobs_pb2.SubmitRequest(spec=struct_of(spec.canonical_json()), request_id=request_id)


class FakeAgent:
    """One node: answers commands as a healthy node would, and does what a test tells it."""

    def __init__(
        self,
        node: str,
        address: Callable[[], str],
        *,
        workers: int = 1,
        token_file: Path | None = None,
    ) -> None:
        self.node = node
        self._token_file = token_file
        self.incarnation = uuid.uuid4().hex
        self.workers = workers
        self.commands: list[agents_pb2.Command] = []
        self.command_times_s: list[float] = []
        self.acked_seq = 0
        self.num_sessions = 0
        self.welcomes: list[agents_pb2.Welcome] = []
        self.is_connected = False
        # Commands by kind that are taken and not answered.
        self.silent_on: set[str] = set()
        self.orders: list[agents_pb2.CheckOrder] = []
        # What it finds: the verdict of its own checks by suite, its result, and GB/s by peer.
        self.verdicts: dict[str, str] = {}
        self.digest = "right"
        self.bandwidths: dict[str, float] = {}
        self.logs = b""
        # Behind which it cuts its logs into two chunks; 0 for one.
        self.logs_cut_at = 0
        self.log_queries: list[agents_pb2.LogQuery] = []
        # host:port of a metrics page that it claims to serve.
        self.metrics_address = ""
        # What it says that the data and its node have; nothing unless told to.
        self.num_samples = 0
        self.capacity: common_pb2.NodeCapacity | None = None
        # What each heartbeat says of the node's links.
        self.links: list[common_pb2.LinkWindow] = []
        self.running: dict[int, tuple[str, int]] = {}
        self._address = address
        self._unacked: list[agents_pb2.AgentEvent] = []
        self._seq = 0
        self._call: grpc.aio.StreamStreamCall | None = None
        self._task: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def rejoin(self) -> None:
        """Leave and come back, with another hello."""
        sessions = self.num_sessions
        await self.stop()
        self.start()
        await until(lambda: self.is_connected and self.num_sessions > sessions, "it is back")

    @property
    def sent_seq(self) -> int:
        """Number of the last event that was sent."""
        return self._seq

    def kinds(self) -> list[str]:
        return [str(command.WhichOneof("kind")) for command in self.commands]

    def last(self, kind: str) -> agents_pb2.Command:
        return [c for c in self.commands if c.WhichOneof("kind") == kind][-1]

    def count(self, kind: str) -> int:
        return self.kinds().count(kind)

    async def send(self, event: agents_pb2.AgentEvent) -> int:
        """Send an event that is repeated until acknowledged; its number."""
        self._seq += 1
        event.seq = self._seq
        event.at_s = event.at_s or time.time()
        self._unacked.append(event)
        await self._write(agents_pb2.AgentMessage(event=event))
        return event.seq

    async def heartbeat(self, *ranks: agents_pb2.RankSummary) -> None:
        beat = agents_pb2.Heartbeat(at_s=time.time(), ranks=ranks, links=self.links)
        await self._write(agents_pb2.AgentMessage(heartbeat=beat))

    async def progress(self, step: int, *, resumed: int = 0) -> int:
        """Every local rank completed this step."""
        job_id, attempt = next(iter(self.running.values()))
        return await self.send(
            agents_pb2.AgentEvent(
                job_id=job_id,
                attempt=attempt,
                progress=agents_pb2.ProgressMade(
                    completed_step=step,
                    resumed_step=resumed,
                    completed_at_s=time.time(),
                    start_split_s={"fork": 0.01, "first_step": 0.2},
                    num_samples=self.num_samples,
                ),
            )
        )

    async def report(
        self, *losses: float, first_step: int = 1, split: common_pb2.StepSplit | None = None
    ) -> int:
        """Step reports, one for each loss; the last has the parts of all of them."""
        job_id, attempt = next(iter(self.running.values()))
        reports = [
            common_pb2.StepReport(
                step=first_step + index,
                attempt=attempt,
                loss=loss,
                tokens=100,
                duration_s=0.1,
                at_s=time.time(),
            )
            for index, loss in enumerate(losses)
        ]
        if split is not None:
            reports[-1].split.CopyFrom(split)
        return await self.send(
            agents_pb2.AgentEvent(
                job_id=job_id,
                attempt=attempt,
                step_reports=agents_pb2.StepReports(reports=reports),
            )
        )

    async def commit(self, job_id: str, step: int, *, attempt: int = 1) -> int:
        """A checkpoint is in storage."""
        committed = agents_pb2.CheckpointCommitted(step=step, size_bytes=1)
        return await self.send(
            agents_pb2.AgentEvent(job_id=job_id, attempt=attempt, checkpoint_committed=committed)
        )

    async def exit(self, rank: int, code: int, *, step: int = 0, **facts: object) -> int:
        """A worker ends."""
        job_id, attempt = self.running.pop(rank)
        return await self.send(
            agents_pb2.AgentEvent(
                job_id=job_id,
                attempt=attempt,
                worker_exited=agents_pb2.WorkerExited(
                    rank=rank,
                    exit=agents_pb2.WorkerExit(
                        code=code, at_s=time.time(), completed_step=step, **facts
                    ),
                ),
            )
        )

    async def _write(self, message: agents_pb2.AgentMessage) -> None:
        """One after the other, in the order of the calls: events carry rising numbers."""
        async with self._writing:
            if not self.is_connected or self._call is None:
                return
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self.is_connected = False

    async def _run(self) -> None:
        # gRPC may raise the error of a stream that has just ended in place of a cancellation.
        task = asyncio.current_task()
        while task is not None and not task.cancelling():
            try:
                async with grpc.aio.insecure_channel(
                    self._address(), options=[("grpc.use_local_subchannel_pool", 1)]
                ) as channel:
                    await self._session(channel)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, OSError, KeyError, ValueError):
                pass
            self.is_connected = False
            await asyncio.sleep(0.02)

    async def _session(self, channel: grpc.aio.Channel) -> None:
        shown = join_token.metadata(self._token_file)
        self._call = AgentsStub(channel).Session(metadata=shown)
        beats = asyncio.create_task(self._beat())
        try:
            await self._call.write(agents_pb2.AgentMessage(hello=self._hello()))
            async for message in self._call:
                await self._take(message)
        finally:
            self.is_connected = False
            beats.cancel()
            self._call.cancel()

    async def _beat(self) -> None:
        """As often as the controller wants, and a little more."""
        while True:
            await self.heartbeat()
            period_s = self.welcomes[-1].heartbeat_period_s if self.welcomes else 0.1
            await asyncio.sleep(min(0.5, period_s) / 2)

    def _hello(self) -> agents_pb2.Hello:
        return agents_pb2.Hello(
            node_id=self.node,
            incarnation=self.incarnation,
            address="127.0.0.1",
            rendezvous_port=4242,
            workers=self.workers,
            metrics_address=self.metrics_address,
            capacity=self.capacity,
            worker_statuses=[
                agents_pb2.WorkerStatus(job_id=job_id, attempt=attempt, rank=rank, running=True)
                for rank, (job_id, attempt) in self.running.items()
            ],
        )

    async def _take(self, message: agents_pb2.ControllerMessage) -> None:
        match message.WhichOneof("kind"):
            case "welcome":
                self.welcomes.append(message.welcome)
                if not self.is_connected:
                    self.is_connected = True
                    self.num_sessions += 1
                    for event in list(self._unacked):
                        await self._write(agents_pb2.AgentMessage(event=event))
            case "acked_event_seq":
                self.acked_seq = max(self.acked_seq, message.acked_event_seq)
                self._unacked = [e for e in self._unacked if e.seq > self.acked_seq]
            case "command":
                self.commands.append(message.command)
                self.command_times_s.append(time.monotonic())
                if message.command.WhichOneof("kind") not in self.silent_on:
                    await self.answer(message.command)
            case "log_query":
                self.log_queries.append(message.log_query)
                if not message.log_query.cancel and "log_query" not in self.silent_on:
                    await self._answer_logs(message.log_query)
            case "check_order":
                await self._check(message.check_order)

    async def _check(self, order: agents_pb2.CheckOrder) -> None:
        """A healthy node: its own checks pass, and it exchanges as fast as any other."""
        kind = order.WhichOneof("kind")
        self.orders.append(order)
        if kind in self.silent_on:
            return
        report = agents_pb2.CheckReport(order_id=order.order_id, begun=True)
        if kind == "host":
            report.listening_port = 4242
        await self._write(agents_pb2.AgentMessage(check_report=report))
        done = agents_pb2.CheckReport(order_id=order.order_id, done=True)
        if kind == "on_this_node":
            done.findings.add(
                test="device",
                verdict=self.verdicts.get(order.suite, "pass"),
                digest=self.digest,
                digest_key="a kind",
            )
        elif kind == "host":
            peer = order.host.peer
            value = self.bandwidths.get(peer, 1.0)
            done.findings.add(test="pair", metric="wrong_elements", peer=peer, verdict="pass")
            done.findings.add(
                test="pair",
                metric="all_reduce_bandwidth",
                value=value,
                peer=peer,
                verdict="pass",
                baseline_key="pair",
            )
        await self._write(agents_pb2.AgentMessage(check_report=done))

    async def answer(self, command: agents_pb2.Command, **changes: object) -> None:
        """Say that a command was carried out."""
        result = agents_pb2.CommandResult(command_id=command.command_id, ok=True, completed_step=-1)
        match command.WhichOneof("kind"):
            case "start_workers":
                for rank in command.start_workers.ranks:
                    self.running[rank] = (command.job_id, command.attempt)
            case "stop_workers":
                self.running.clear()
                result.completed_step = 3
            case "run_suite":
                result.findings.add(test="device", node=self.node, verdict="pass")
        for name, value in changes.items():
            setattr(result, name, value)
        await self.send(
            agents_pb2.AgentEvent(
                job_id=command.job_id, attempt=command.attempt, command_result=result
            )
        )

    async def _answer_logs(self, query: agents_pb2.LogQuery) -> None:
        cut = self.logs_cut_at
        for rank in self.running or {0: None}:
            for data in (self.logs[:cut], self.logs[cut:]) if cut else (self.logs,):
                chunk = agents_pb2.LogChunk(
                    query_id=query.query_id, rank=rank, attempt=1, data=data, is_selected=True
                )
                await self._write(agents_pb2.AgentMessage(log_chunk=chunk))
        if not query.follow:
            end = agents_pb2.LogChunk(query_id=query.query_id, end=True)
            await self._write(agents_pb2.AgentMessage(log_chunk=end))


class Lab:
    """A controller in this process and the agents of a test."""

    def __init__(self, running: app.Running, token_file: Path | None) -> None:
        self.running = running
        self.token_file = token_file
        self.agents: list[FakeAgent] = []
        self._channel = grpc.aio.insecure_channel(running.grpc)
        self.jobs = JobsStub(self._channel)

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._channel

    async def add_agents(self, count: int, *, workers: int = 1) -> list[FakeAgent]:
        """Healthy nodes that have joined."""
        new = [
            FakeAgent(
                f"n{len(self.agents) + i}",
                lambda: self.running.grpc,
                workers=workers,
                token_file=self.token_file,
            )
            for i in range(count)
        ]
        self.agents += new
        for agent in new:
            agent.start()
        await until(lambda: all(agent.is_connected for agent in new), "agents join")
        return new

    async def job(self, job_id: str) -> jobs_pb2.Job:
        return (await self.jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job_id))).job

    async def reach(self, job_id: str, state: str) -> jobs_pb2.Job:
        """Wait until a job is in a state."""
        deadline_s = time.monotonic() + DEADLINE_S
        while (job := await self.job(job_id)).state != state:
            assert time.monotonic() < deadline_s, f"{job_id} is {job.state}, not {state}: {job}"
            await asyncio.sleep(0.005)
        return job

    async def start_job(self, **changes: object) -> str:
        """Submit a job and bring it to RUNNING."""
        job_id: str = (await self.jobs.Submit(submit_request(**changes))).job.job_id
        await self.started(1)
        await self.train(1)
        await self.reach(job_id, "RUNNING")
        return job_id

    async def started(self, times: int) -> None:
        """Wait until every agent was told to start this often."""
        await until(
            lambda: all(agent.count("start_workers") == times for agent in self.agents),
            f"start number {times}",
        )
        await until(lambda: all(agent.running for agent in self.agents), "workers run")

    async def train(self, step: int, *, resumed: int = 0) -> None:
        for agent in self.agents:
            await agent.progress(step, resumed=resumed)

    async def close(self) -> None:
        await asyncio.gather(*(agent.stop() for agent in self.agents))
        await self._channel.close()


@asynccontextmanager
async def lab(
    state_dir: Path,
    settings: Settings | None = None,
    join_token_file: Path | None = None,
    notify: Notify = NOBODY,
    **access: object,
) -> AsyncIterator[Lab]:
    """A controller that listens on free ports, until the end of the block.

    `access`: options of who may connect and call.
    """
    stop = asyncio.Event()
    ready: asyncio.Future[app.Running] = asyncio.get_running_loop().create_future()
    options = Options(
        state_dir=state_dir,
        notify=notify,
        grpc="127.0.0.1:0",
        http="127.0.0.1:0",
        settings=settings or Settings(),
        join_token_file=join_token_file,
        **access,  # type: ignore[arg-type]  # as the test gives them
    )
    life: Awaitable[None] = asyncio.ensure_future(app.run(options, ready.set_result, stop=stop))
    await asyncio.wait([ready, life], return_when=asyncio.FIRST_COMPLETED)
    if not ready.done():
        await life
    bench = Lab(ready.result(), options.token_file)
    try:
        yield bench
    finally:
        await bench.close()
        stop.set()
        await life
