"""Thousands of agents in one process, as little as a controller can tell from real ones.

Each has a connection of its own, says hello, sends a heartbeat of eight ranks in each period, and
carries out orders at once. One heartbeat in some asks the controller for its clock: how long that
one was on its way, until the controller had read it, is what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import grpc
import grpc.aio

from bench.controller.fleet import WORKERS
from outlast.clock import node_time_ns
from outlast.v1 import agents_pb2, common_pb2

_METHOD = "/outlast.v1.Agents/Session"
_OPTIONS = (
    # A connection of its own for each, as between machines.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
# Of so many heartbeats one asks for the controller's clock, as real agents do every 16 s.
_PROBED_EVERY = 8
_MOST_BACKOFF_S = 2.0


class Agent:
    """One node."""

    def __init__(self, number: int, count: int, address: str, period_s: float) -> None:
        self.node = f"node-{number:05d}"
        self.is_welcome = asyncio.Event()
        # A frozen one says nothing more, and keeps its connection as long as the controller does.
        self.beats = True
        self.latencies_s: list[float] = []
        self.num_sent = 0
        self._address = address
        self._number = number
        self._period_s = period_s
        # Agents do not beat in the same moment.
        self._offset_s = period_s * number / count
        self._message = agents_pb2.AgentMessage(heartbeat=agents_pb2.Heartbeat())
        self._seq = 0
        self._writing = asyncio.Lock()
        self._call: Any = None

    async def live(self) -> None:
        """A session after the other, until the task is cancelled."""
        backoff_s = 0.05
        task = asyncio.current_task()
        assert task is not None, "it runs in one"
        while not task.cancelling():
            # gRPC says of a call that was cancelled what asyncio says of a task.
            with contextlib.suppress(
                grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError
            ):
                async with grpc.aio.insecure_channel(self._address, options=_OPTIONS) as channel:
                    await self._session(channel)
            if task.cancelling() or not self.beats:
                return
            if self.is_welcome.is_set():
                backoff_s = 0.05
            self.is_welcome.clear()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MOST_BACKOFF_S)

    def hang_up(self) -> None:
        """The connection breaks."""
        if self._call is not None:
            self._call.cancel()

    async def _session(self, channel: grpc.aio.Channel) -> None:
        open_session: Any = channel.stream_stream
        self._call = call = open_session(_METHOD)()
        hello = agents_pb2.Hello(
            node_id=self.node,
            incarnation="benchmark",
            address="127.0.0.1",
            rendezvous_port=29500,
            workers=WORKERS,
            worker_statuses=[
                agents_pb2.WorkerStatus(
                    job_id=each.job_id, attempt=each.attempt, rank=each.rank, running=True
                )
                for each in self._message.heartbeat.ranks
            ],
        )
        await call.write(agents_pb2.AgentMessage(hello=hello).SerializeToString())
        beating = asyncio.create_task(self._beat())
        try:
            async for data in call:
                await self._take(agents_pb2.ControllerMessage.FromString(data))
        finally:
            beating.cancel()
            call.cancel()

    async def _beat(self) -> None:
        await self.is_welcome.wait()
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._offset_s
        number = self._number
        while True:
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            due_s += self._period_s
            if not self.beats:
                continue
            number += 1
            beat = self._message.heartbeat
            beat.at_s = time.time()
            beat.clock_sent_ns = node_time_ns() if number % _PROBED_EVERY == 0 else 0
            data = self._message.SerializeToString()
            async with self._writing:
                await self._call.write(data)
            self.num_sent += 1

    async def _take(self, message: agents_pb2.ControllerMessage) -> None:
        if not self.beats:
            return
        match message.WhichOneof("kind"):
            case "welcome":
                self._period_s = message.welcome.heartbeat_period_s
                self.is_welcome.set()
            case "clock_echo":
                echo = message.clock_echo
                self.latencies_s.append((echo.received_ns - echo.sent_ns) / 1e9)
            case "command":
                await self._obey(message.command)

    async def _obey(self, command: agents_pb2.Command) -> None:
        result = agents_pb2.CommandResult(command_id=command.command_id, ok=True, completed_step=1)
        events = [agents_pb2.AgentEvent(command_result=result)]
        match command.WhichOneof("kind"):
            case "start_workers":
                self.train(command)
                progress = agents_pb2.ProgressMade(completed_step=1, resumed_step=0)
                events.append(agents_pb2.AgentEvent(progress=progress))
            case "stop_workers":
                del self._message.heartbeat.ranks[:]
        async with self._writing:
            for event in events:
                self._seq += 1
                event.seq, event.job_id, event.attempt = (
                    self._seq,
                    command.job_id,
                    command.attempt,
                )
                await self._call.write(agents_pb2.AgentMessage(event=event).SerializeToString())

    def train(self, command: agents_pb2.Command) -> None:
        """From now on heartbeats tell of these ranks."""
        split = common_pb2.StepSplit(
            **dict.fromkeys(common_pb2.StepSplit.DESCRIPTOR.fields_by_name, 0.1)
        )
        beat = self._message.heartbeat
        del beat.ranks[:]
        beat.ranks.extend(
            agents_pb2.RankSummary(
                job_id=command.job_id,
                attempt=command.attempt,
                rank=rank,
                phase="forward_backward",
                completed_step=1,
                use=agents_pb2.RankUse(split=split, peak_memory_bytes=2**30),
            )
            for rank in command.start_workers.ranks
        )


class Fleet:
    """All of them."""

    def __init__(self, count: int, address: str, period_s: float) -> None:
        self.agents = [Agent(number, count, address, period_s) for number in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    async def join(self, within_s: float) -> float:
        """Connect all of them; seconds until each had its welcome."""
        begun_s = asyncio.get_running_loop().time()
        for number, agent in enumerate(self.agents):
            self._tasks.append(asyncio.create_task(agent.live()))
            if number % 64 == 63:
                # More at once than the kernel's queue of connections takes wait for seconds.
                await asyncio.sleep(0.01)
        await self.welcome(within_s)
        return asyncio.get_running_loop().time() - begun_s

    async def welcome(self, within_s: float) -> None:
        """Wait until each has a session."""
        async with asyncio.timeout(within_s):
            for agent in self.agents:
                await agent.is_welcome.wait()

    async def lose(self, share: float) -> None:
        """So many of them, the last ones, are gone for good."""
        await self._end(self._tasks[round(len(self._tasks) * (1 - share)) :])

    async def leave(self) -> None:
        """All of them are gone."""
        await self._end(self._tasks)

    async def _end(self, tasks: list[asyncio.Task[None]]) -> None:
        pending = {task for task in tasks if not task.done()}
        while pending:
            # gRPC may take a cancellation for the end of a call: it is asked for again.
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=1.0)

    def take_latencies(self) -> list[float]:
        """Those since the last call, shortest first."""
        found = sorted(value for agent in self.agents for value in agent.latencies_s)
        for agent in self.agents:
            agent.latencies_s.clear()
        return found

    def num_sent(self) -> int:
        """Heartbeats so far."""
        return sum(agent.num_sent for agent in self.agents)


def percentile(values: list[float], share: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]
