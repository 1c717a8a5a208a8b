"""A whole agent in a thread of this process, and the rounds of work that it is given."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from checkpoint.core.names import memory_folder
from checkpoint.core.slots import ReplicaState, UploadState
from checkpoint.replicas import fetch as replica_fetch
from checkpoint.replicas import sender as replicas
from checkpoint.replicas import wire as replica_wire
from checkpoint.replicas.holder import Duty, Holder
from checkpoint.replicas.wire import Peer
from checkpoint.stage import guarding
from checkpoint.upload import insisting
from checkpoint.upload import uploader as upload
from controller.agent import diagnostics, mistakes, session, threads
from controller.agent.agent import Agent
from controller.agent.config import AgentConfig, Limits
from controller.agent.core import commands
from controller.agent.observe import host, pruning
from controller.agent.run import make_agent
from controller.agent.workers import orphans, standby_link
from outlast.errors import OutlastError
from outlast.spec.parse import parse_spec
from outlast.v1 import agents_pb2
from tests.agent.faults.slots import seal_slot
from tests.agent.harness import FakeController, wait_for

# Of one command or event on a machine that does other things, too.
DEADLINE_S = 30.0
# While something fails, what does not come so soon may never come.
PATIENCE_S = 0.5
PARTS = frozenset(
    {"session", "reporter", "stall_watch", "host", "links", "orphans", "pruning", "standby"}
)


def hurry() -> None:
    """Pauses after a failure, and between looks, are short: a round takes no longer for them."""
    standby_link._RESTART_DELAYS_S = (0.0, 0.02, 0.05, 0.1)
    standby_link.FORK_TIMEOUT_S, standby_link.READY_PATIENCE_S = 3.0, 2.0
    mistakes._RESTART_FIRST_S, mistakes._RESTART_MOST_S = 0.02, 0.1
    session.BACKOFF_MOST_S = 0.1
    host.LOOK_PERIOD_S = orphans.LOOK_PERIOD_S = pruning.LOOK_PERIOD_S = 0.1
    upload._RETRY_AFTER_S = guarding._RETRY_AFTER_S = insisting._FIRST_LOOK_S = 0.1
    replicas._RETRY_S = replica_fetch._RETRY_S = 0.05
    replica_fetch._BEGIN_S = replica_wire.SILENCE_S = 1.0
    replica_wire.Line.receive.__defaults__ = (replica_wire.SILENCE_S,)
    vars(upload)["backoff_s"] = lambda failures, jitter: 0.01
    diagnostics.KILL_AFTER_S = 5.0
    commands.FORGET_PAUSE_S = threads._START_PAUSE_S = 0.05


class Said(logging.Handler):
    """What the agent has logged, newest last."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")
        del self.lines[:-200]


@dataclass(slots=True, kw_only=True)
class Answered:
    """What a round of work came to; `refused` is why commands were not carried out."""

    refused: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mute: list[str] = field(default_factory=list)
    """Commands that failed without a word about why."""

    @property
    def is_whole(self) -> bool:
        return not (self.refused or self.missing or self.mute)


class Node:
    """An agent, its controller, and the other node that its job has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory_dir = Path("/dev/shm") / f"outlast-test-{uuid4().hex[:8]}" / "n0"
        # A folder is read as the standard library is, and has fewer files to look at.
        self._text_dir = folder / "text"
        (self._text_dir / "more").mkdir(parents=True)
        (self._text_dir / "some.txt").write_text("text " * 10_000)
        self.controller = FakeController()
        self.controller.heartbeat_period_s = 0.05
        self._port = self.controller.start()
        self._address_file = folder / "controller.json"
        self._address_file.write_text(f'{{"grpc": "127.0.0.1:{self._port}"}}')
        self.error: BaseException | None = None
        self.agent: Agent | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._num_jobs = 0
        self._unforgotten: list[agents_pb2.Command] = []
        self.said = Said()
        logging.getLogger().addHandler(self.said)
        logging.getLogger().setLevel(logging.INFO)

    def config(self) -> AgentConfig:
        return AgentConfig(
            node="n0",
            controller="127.0.0.1:1",
            controller_file=self._address_file,
            state_dir=self.folder / "state",
            memory_dir=self.memory_dir,
            data_dir=self.folder / "data",
            workers=2,
            metrics_port=0,
            standby_arguments=("--entry=tests.agent.entry:run", "--preload="),
            suite_runner="tests.agent.fake_runner",
            limits=Limits(standby_ready_s=12.0, kill_s=3.0, probe_s=5.0),
        )

    def start(self) -> None:
        self.error = None
        self.agent = None
        self.controller.hellos.clear()
        self._thread = threading.Thread(target=self._run, name="agent", daemon=True)
        self._thread.start()

    def wait_up(self) -> bool:
        """Whether it has said hello; False when it has ended instead."""
        assert self._thread is not None
        thread = self._thread
        wait_for(lambda: self.controller.hellos or not thread.is_alive(), "hello", DEADLINE_S)
        return thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Have the agent end in order."""
        if self._thread is None:
            return
        with contextlib.suppress(RuntimeError):
            if self._loop is not None and self._stop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the agent does not end"
        self._thread = None

    def close(self) -> None:
        self.stop()
        self.controller.stop()
        logging.getLogger().removeHandler(self.said)
        shutil.rmtree(self.memory_dir.parent, ignore_errors=True)

    def _run(self) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            self.agent = make_agent(self.config())
            await self.agent.run(self._stop)

        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001  # whoever looks after it says what it means
            self.error = error
            if self.agent is None:
                release(error)

    def why_ended(self) -> str:
        """What is wrong with how it ended; "" where it says why in words, or runs."""
        if self.error is None or (isinstance(self.error, OutlastError) and str(self.error)):
            return ""
        return f"the agent ended: {self.error!r}"

    def tasks(self) -> set[str]:
        """Names of the tasks in the agent's loop."""
        assert self._loop is not None
        return {task.get_name() for task in asyncio.all_tasks(self._loop)}

    def forget_again(self, answered: Answered) -> None:
        """As the controller asks a node that has come back."""
        left, self._unforgotten = self._unforgotten, []
        self.controller.received.clear()
        for command in left:
            self._do(answered, command)

    # Rounds of work. Each leaves nothing behind.

    def job(self, answered: Answered) -> None:
        """Start, look at, save, check and stop a job of one rank, and forget it."""
        job_id = self._next()
        folder = self.memory_dir / job_id
        seal_slot(folder, rank=0, world_size=1, upload=UploadState.WANTED)
        url = (self.folder / "storage" / job_id).as_uri()
        started = self._start(job_id, 1, answered, nodes=("n0",), url=url)
        if started:
            self._await(answered, "progress", lambda: self._reported("progress", job_id))
            self._read_logs(job_id, answered)
        self._suite(job_id, answered)
        self._scrape(answered)
        self._reconnect()
        if started:
            self._await(
                answered,
                "the end of an upload",
                lambda: (
                    self._reported("checkpoint_committed", job_id)
                    or self._reported("checkpoint_trouble", job_id)
                ),
            )
        stop = agents_pb2.StopWorkers(graceful=True, timeout_s=5.0)
        self._do(answered, agents_pb2.Command(job_id=job_id, attempt=1, stop_workers=stop))
        if started:
            self._await(answered, "an exit", lambda: self._reported("worker_exited", job_id))
        self._forget(job_id, answered)

    def attempt(self, number: int, answered: Answered) -> None:
        """Another attempt of a job that is never forgotten, with its checkpoint."""
        self.controller.received.clear()
        url = (self.folder / "storage" / "long").as_uri()
        seal_slot(
            self.memory_dir / "long", rank=0, world_size=1, upload=UploadState.WANTED, step=number
        )
        self._start("long", number, answered, nodes=("n0",), url=url)
        self._await(answered, "progress", lambda: self._reported("progress", "long"))
        done = "checkpoint_committed"
        self._await(answered, "a checkpoint", lambda: self._reported(done, "long"))
        stop = agents_pb2.StopWorkers(graceful=True, timeout_s=5.0)
        self._do(answered, agents_pb2.Command(job_id="long", attempt=number, stop_workers=stop))

    def push(self, answered: Answered) -> None:
        """Stop a job, then have its memory uploaded on request."""
        job_id = self._next()
        url = (self.folder / "storage" / job_id).as_uri()
        started = self._start(job_id, 1, answered, nodes=("n0",), url=url)
        stop = agents_pb2.StopWorkers(graceful=False, timeout_s=5.0)
        self._do(answered, agents_pb2.Command(job_id=job_id, attempt=1, stop_workers=stop))
        if started:
            seal_slot(self.memory_dir / job_id, rank=0, world_size=1, upload=UploadState.NONE)
            push = agents_pb2.PushCheckpoint(checkpoint_url=url, timeout_s=2.0)
            self._do(answered, agents_pb2.Command(job_id=job_id, push_checkpoint=push))
        self._forget(job_id, answered)

    def look(self, answered: Answered) -> None:
        """Stop a job that is stuck, with a look at what it does."""
        job_id = self._next()
        self._start(job_id, 1, answered, nodes=("n0",))
        stop = agents_pb2.StopWorkers(graceful=False, timeout_s=5.0, capture_stacks=True)
        self._do(answered, agents_pb2.Command(job_id=job_id, attempt=1, stop_workers=stop))
        self._forget(job_id, answered)

    def standby(self, answered: Answered) -> None:
        """Lose the standby process beside a worker, and start another one."""
        job_id = self._next()
        self._start(job_id, 1, answered, nodes=("n0",))
        assert self.agent is not None
        pid = self.agent._standby.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._start(job_id, 2, answered, nodes=("n0",))
        self._forget(job_id, answered)

    def copies(self, answered: Answered) -> None:
        """Bring copies to another node, and have them back at the next attempt."""
        job_id = self._next()
        other = Holder(self.memory_dir.parent / "n1", "127.0.0.1", "token")
        try:
            ours = self.memory_dir / job_id
            seal_slot(ours, rank=0, world_size=2, replica=ReplicaState.WANTED)
            duty = Duty(attempt=1, ranks=frozenset({0}), bytes_per_s=None)
            other.take_duty(job_id, duty)
            if self._start(job_id, 1, answered, nodes=("n0", "n1"), other=other):
                copies = other.newest_copies
                self._await(answered, "a copy elsewhere", lambda: (job_id, 0) in copies())
                self._exchange(job_id, answered)
            stop = agents_pb2.StopWorkers(timeout_s=5.0)
            self._do(answered, agents_pb2.Command(job_id=job_id, attempt=1, stop_workers=stop))
            shutil.rmtree(ours / memory_folder(0), ignore_errors=True)
            other.take_duty(job_id, Duty(attempt=2, ranks=frozenset({0}), bytes_per_s=None))
            self._start(job_id, 2, answered, nodes=("n0", "n1"), other=other)
            self._forget(job_id, answered)
        finally:
            other.close()
            shutil.rmtree(self.memory_dir.parent / "n1", ignore_errors=True)

    def _exchange(self, job_id: str, answered: Answered) -> None:
        """The other node brings a copy of its rank here, and asks for it back."""
        hello = self.controller.hellos[-1]
        theirs = self.memory_dir.parent / "n1" / job_id
        seal_slot(theirs, rank=1, world_size=2, replica=ReplicaState.WANTED)
        peer = Peer(
            node="n0",
            address="127.0.0.1",
            port=hello.replica_port,
            token=hello.replica_token,
        )
        sender = replicas.Replicator(job_id, 1, theirs, {1: peer}, lambda step, detail: None)
        sender.start()
        try:
            # With one refusal a copy is given up until training asks for the next.
            self._await(answered, "a copy here", lambda: self._holds(job_id), is_expected=False)
        finally:
            sender.stop()
        fetcher = replica_fetch.Fetcher(job_id, 1, num_slots=3, pause=lambda seconds: True)
        source = replica_fetch.Source(peer=peer, rank=1, own=False)
        fetcher.fetch(1, self.memory_dir.parent / "n1" / "back", [source])
        fetcher.close()

    def _holds(self, job_id: str) -> bool:
        assert self.agent is not None
        return (job_id, 1) in self.agent._replicas._holder.newest_copies()

    def _next(self) -> str:
        self._num_jobs += 1
        self.controller.received.clear()
        return f"job-{self._num_jobs}"

    def _start(
        self,
        job_id: str,
        attempt: int,
        answered: Answered,
        *,
        nodes: tuple[str, ...],
        url: str = "",
        other: Holder | None = None,
    ) -> bool:
        spec = parse_spec(
            {
                "name": job_id,
                "steps": 1_000_000,
                "parallel": {"pp": len(nodes)},
                "resources": {"nodes": len(nodes), "workers_per_node": 1},
                "checkpoint": {"replicas": len(nodes) - 1},
                "data": {"source": str(self._text_dir)},
            }
        )
        start = agents_pb2.StartWorkers(
            spec_json=spec.canonical_json(),
            ranks=[0],
            world_size=len(nodes),
            rendezvous_host="127.0.0.1",
            rendezvous_port=1,
            rank_nodes=nodes,
            committed_step=-1 if url else 0,
            checkpoint_url=url or (self.folder / "storage" / job_id).as_uri(),
        )
        if other is not None:
            start.replica_peers.add(
                node_id="n1", address="127.0.0.1", port=other.port, token="token"
            )
        command = agents_pb2.Command(job_id=job_id, attempt=attempt, start_workers=start)
        return self._do(answered, command)

    def _reconnect(self) -> None:
        num_hellos = len(self.controller.hellos)
        self.controller.drop_connection()
        with contextlib.suppress(AssertionError):
            wait_for(lambda: self._has_come_back(num_hellos), "a hello", self.patience_s)
            return
        self.relent()
        wait_for(lambda: self._has_come_back(num_hellos), "a hello", DEADLINE_S)

    def _has_come_back(self, num_hellos: int) -> bool:
        return len(self.controller.hellos) > num_hellos or not self.is_alive

    def _do(self, answered: Answered, command: agents_pb2.Command) -> bool:
        """Have a command carried out; each must be answered."""
        kind = command.WhichOneof("kind")
        command.command_id = command.command_id or f"c-{uuid4().hex[:8]}"
        deadline_s = time.monotonic() + DEADLINE_S
        while self.is_alive and time.monotonic() < deadline_s:
            # As the real one does: again until it is answered, over whichever connection.
            self.controller.send(agents_pb2.ControllerMessage(command=command))
            with contextlib.suppress(AssertionError):
                result = self.controller.result(command.command_id, timeout_s=2.0)
                if not result.ok:
                    answered.refused.append(f"{kind}: {result.error_kind}: {result.detail}")
                    if not (result.detail and result.error_kind):
                        answered.mute.append(str(kind))
                return result.ok
            # While nothing gets through, nobody can be answered.
            self.relent()
        answered.mute.append(f"{kind} is not answered")
        return False

    def _forget(self, job_id: str, answered: Answered) -> None:
        forget = agents_pb2.ForgetJob()
        command = agents_pb2.Command(job_id=job_id, attempt=9, forget_job=forget)
        command.command_id = f"{job_id}/forget"
        if not self._do(answered, command):
            self._unforgotten.append(command)
        shutil.rmtree(self.folder / "storage" / job_id, ignore_errors=True)
        shutil.rmtree(self.memory_dir / job_id, ignore_errors=True)

    def _suite(self, job_id: str, answered: Answered) -> None:
        suite = agents_pb2.RunSuite(suite="preflight", timeout_s=5.0)
        self._do(answered, agents_pb2.Command(job_id=job_id, run_suite=suite))

    def _reported(self, kind: str, job_id: str) -> bool:
        return any(event.job_id == job_id for event in self.controller.events(kind))

    def _await(
        self,
        answered: Answered,
        what: str,
        find: Callable[[], object],
        *,
        is_expected: bool = True,
    ) -> None:
        try:
            wait_for(find, what, self.patience_s)
        except AssertionError:
            if is_expected or self.patience_s == DEADLINE_S:
                answered.missing.append(what)

    patience_s = DEADLINE_S
    # Lets no call fail any more.
    relent: Callable[[], None] = staticmethod(lambda: None)

    def _read_logs(self, job_id: str, answered: Answered) -> None:
        query = agents_pb2.LogQuery(query_id=job_id, job_id=job_id, timestamps=True)
        self.controller.send(agents_pb2.ControllerMessage(log_query=query))

        def ends() -> bool:
            chunks = [m.log_chunk for _, m in self.controller.received if m.HasField("log_chunk")]
            return any(chunk.end and chunk.query_id == job_id for chunk in chunks)

        self._await(answered, "the end of the logs", ends)

    def _scrape(self, answered: Answered) -> None:
        address = self.controller.hellos[-1].metrics_address
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
                page.read()
        except OSError as error:
            answered.missing.append(f"the metrics page: {error}")


def release(error: BaseException) -> None:
    """Close what an agent holds that failed while it was made, as the end of its process does."""
    causes = [error, *([error.__cause__] if error.__cause__ is not None else [])]
    for cause in causes:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            made = frame.f_locals.get("self")
            for part in ("_state", "_rendezvous", "_replicas", "_host"):
                if isinstance(made, Agent) and (held := getattr(made, part, None)) is not None:
                    getattr(held, "_holder", held).close()
            if isinstance(made, Holder) and hasattr(made, "_listening"):
                made.close()
        cause.__traceback__ = None


ROUNDS: dict[str, Callable[[Node, Answered], None]] = {
    "job": Node.job,
    "copies": Node.copies,
    "push": Node.push,
    "standby": Node.standby,
    "look": Node.look,
}
