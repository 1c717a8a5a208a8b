"""A controller that only listens and talks, and an agent process to talk to."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from outlast.spec.parse import parse_spec
from outlast.startup import python_command
from outlast.v1 import agents_pb2
from outlast.v1.agents_pb2_grpc import AgentsServicer, add_AgentsServicer_to_server

REPOSITORY = Path(__file__).parents[2]
# Generous: two cores are shared with whatever else runs.
DEADLINE_S = 60.0

Found = TypeVar("Found")


def wait_for(find: Callable[[], Found | None], what: str, timeout_s: float = DEADLINE_S) -> Found:
    """What `find` returns once it is true; fails after the deadline."""
    end_s = time.monotonic() + timeout_s
    pause_s = 0.002
    while True:
        found = find()
        if found:
            return found
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(pause_s)
        # What takes long is looked at less often: each look goes through all messages.
        pause_s = min(1.2 * pause_s, 0.02)


class FakeController(AgentsServicer):
    """Welcomes agents, keeps what they say and sends what a test wants."""

    def __init__(self, *, absence_limit_s: float = 600.0, acknowledges: bool = True) -> None:
        self.absence_limit_s = absence_limit_s
        self.acknowledges = acknowledges
        self.heartbeat_period_s = 0.2
        # Agents are refused, since a newer one has taken their place.
        self.is_stale = False
        self.hellos: list[agents_pb2.Hello] = []
        self.received: list[tuple[float, agents_pb2.AgentMessage]] = []
        self._outgoing: queue.Queue[agents_pb2.ControllerMessage | None] = queue.Queue()
        self._server: grpc.Server | None = None
        self._num_commands = 0

    def start(self, port: int = 0) -> int:
        server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        add_AgentsServicer_to_server(self, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        assert bound
        server.start()
        self._server = server
        return bound

    def stop(self) -> None:
        if self._server is not None:
            self._outgoing.put(None)
            self._server.stop(0).wait()
            self._server = None

    def Session(self, request_iterator, context):  # type: ignore[no-untyped-def]
        first = next(request_iterator)
        outgoing: queue.Queue[agents_pb2.ControllerMessage | None] = queue.Queue()
        self._outgoing = outgoing
        if self.is_stale:
            context.abort_with_status(stale_incarnation())
        self.hellos.append(first.hello)
        threading.Thread(
            target=self._listen, args=(request_iterator, outgoing), daemon=True
        ).start()
        yield self.welcome(self.heartbeat_period_s)
        while (message := outgoing.get()) is not None:
            yield message

    def welcome(self, heartbeat_period_s: float) -> agents_pb2.ControllerMessage:
        return agents_pb2.ControllerMessage(
            welcome=agents_pb2.Welcome(
                term=1,
                heartbeat_period_s=heartbeat_period_s,
                controller_absence_limit_s=self.absence_limit_s,
            )
        )

    def heartbeats(self) -> list[agents_pb2.Heartbeat]:
        return [m.heartbeat for _, m in self.received if m.WhichOneof("kind") == "heartbeat"]

    def _listen(
        self,
        messages: Iterator[agents_pb2.AgentMessage],
        outgoing: queue.Queue[agents_pb2.ControllerMessage | None],
    ) -> None:
        try:
            for message in messages:
                self.received.append((time.time(), message))
                if message.WhichOneof("kind") == "event" and self.acknowledges:
                    outgoing.put(agents_pb2.ControllerMessage(acked_event_seq=message.event.seq))
        except grpc.RpcError:
            pass
        outgoing.put(None)

    def drop_connection(self) -> None:
        """End the present session."""
        self._outgoing.put(None)

    def send(self, message: agents_pb2.ControllerMessage) -> None:
        self._outgoing.put(message)

    def command(self, command: agents_pb2.Command) -> str:
        """Send a command, with a fresh id unless it has one."""
        wait_for(lambda: self.hellos, "a hello")
        if not command.command_id:
            self._num_commands += 1
            command.command_id = f"c{self._num_commands}"
        self.send(agents_pb2.ControllerMessage(command=command))
        return command.command_id

    def events(self, kind: str, since: int = 0) -> list[agents_pb2.AgentEvent]:
        """Events of a kind, among the messages received from number `since` on."""
        return [
            message.event
            for _, message in self.received[since:]
            if message.WhichOneof("kind") == "event" and message.event.WhichOneof("kind") == kind
        ]

    def result(self, command_id: str, timeout_s: float = DEADLINE_S) -> agents_pb2.CommandResult:
        def find() -> agents_pb2.CommandResult | None:
            for event in self.events("command_result"):
                if event.command_result.command_id == command_id:
                    return event.command_result
            return None

        return wait_for(find, f"result of command {command_id}", timeout_s)

    def exit_of(self, job_id: str, attempt: int, rank: int) -> agents_pb2.WorkerExit:
        def find() -> agents_pb2.WorkerExit | None:
            for event in self.events("worker_exited"):
                worker = (event.job_id, event.attempt, event.worker_exited.rank)
                if worker == (job_id, attempt, rank):
                    return event.worker_exited.exit
            return None

        return wait_for(find, f"exit of rank {rank} of {job_id} attempt {attempt}")

    def progress(self, job_id: str, attempt: int) -> agents_pb2.ProgressMade:
        """What is reported of the first step of an attempt."""

        def find() -> agents_pb2.ProgressMade | None:
            for event in self.events("progress"):
                if (event.job_id, event.attempt) == (job_id, attempt):
                    return event.progress
            return None

        return wait_for(find, f"progress of {job_id} attempt {attempt}")

    def comes_to(self, step: int, job_id: str = "job", attempt: int = 1, since: int = 0) -> None:
        """Wait until a heartbeat, of those received from number `since` on, has all ranks there."""

        def is_there() -> bool:
            for _, message in self.received[since:]:
                ranks = message.heartbeat.ranks
                if ranks and all(
                    (rank.job_id, rank.attempt) == (job_id, attempt) and rank.completed_step >= step
                    for rank in ranks
                ):
                    return True
            return False

        wait_for(is_there, f"step {step} of {job_id} attempt {attempt} in heartbeats")


def stale_incarnation() -> Any:
    """What a controller answers to an agent that was replaced."""
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="STALE_INCARNATION", domain="outlast"))
    code = grpc.StatusCode.FAILED_PRECONDITION.value[0]
    return rpc_status.to_status(status_pb2.Status(code=code, message="replaced", details=[packed]))


class AgentProcess:
    """A real agent in a session of its own, as a local cluster starts it."""

    def __init__(
        self, folder: Path, memory_dir: Path, port: int, *extra: str, cwd: Path = REPOSITORY
    ) -> None:
        self.state_dir = folder / "state"
        self.data_dir = folder / "data"
        self.memory_dir = memory_dir
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self.log = folder / "agent.log"
        command = [
            *python_command("controller.agent"),
            *("--node", "n0", "--workers", "2"),
            *("--controller", f"127.0.0.1:{port}"),
            *("--state-dir", str(self.state_dir), "--memory-dir", str(memory_dir)),
            *("--data-dir", str(self.data_dir)),
            *("--standby-argument=--entry=tests.agent.entry:run", "--standby-argument=--preload="),
            *("--suite-runner", "tests.agent.fake_runner"),
            *extra,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=cwd, stdout=log, stderr=log, start_new_session=True
            )

    def behave(self, **behaviours: str) -> None:
        """Say what ranks do: `rank0="raise"`."""
        text = ", ".join(
            f'"{name.removeprefix("rank")}": "{what}"' for name, what in behaviours.items()
        )
        (self.data_dir / "behaviour.json").write_text(f"{{{text}}}")

    def pids(self) -> list[int]:
        """Every process of the agent's session that lives."""
        return session_pids(self.process.pid)

    def standby_pid(self) -> int:
        """The pid of its standby process."""
        return wait_for(
            lambda: _pid_running(self.pids(), b"trainer.worker.standby"), "a standby process"
        )

    def worker_pid(self, attempt: int, rank: int, job_id: str = "job") -> int:
        """The pid that a worker noted in its black box."""
        from outlast.blackbox import Reader

        path = self.state_dir / "jobs" / job_id / f"a{attempt}" / f"rank-{rank:05d}.blackbox"

        def find() -> int | None:
            try:
                reader = Reader(path)
            except (FileNotFoundError, ValueError):
                return None
            pid = reader.present().pid
            reader.close()
            return pid

        return wait_for(find, f"black box {path}")

    def close(self) -> None:
        """Leave nothing of the session behind, whatever the test did."""
        self.process.kill()
        self.process.wait()
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def session_pids(session: int) -> list[int]:
    """Processes of a session, without zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def _pid_running(pids: list[int], word: bytes) -> int | None:
    """The oldest of these processes that runs a command with this word."""
    for pid in sorted(pids):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word in command:
            return pid
    return None


def start_command(
    attempt: int = 1,
    *,
    job_id: str = "job",
    ranks: tuple[int, ...] = (0, 1),
    checkpoint_url: str = "",
    committed_step: int = 0,
    command_id: str = "",
    spec_json: str | None = None,
    owner: str = "",
) -> agents_pb2.Command:
    """Start both ranks of a two-rank job here, which train on nothing."""
    spec = parse_spec({"name": "job", "parallel": {"dp": 2}, "data": {"loader": "rank"}})
    return agents_pb2.Command(
        command_id=command_id,
        job_id=job_id,
        attempt=attempt,
        start_workers=agents_pb2.StartWorkers(
            spec_json=spec.canonical_json() if spec_json is None else spec_json,
            ranks=ranks,
            world_size=2,
            rendezvous_host="127.0.0.1",
            rendezvous_port=1,
            rank_nodes=["n0", "n0"],
            committed_step=committed_step,
            checkpoint_url=checkpoint_url,
            owner=owner,
        ),
    )


def big_spec() -> str:
    """A model that fits no host's memory."""
    model = {"layers": 1000, "hidden": 65536, "heads": 128}
    return parse_spec({"name": "job", "parallel": {"dp": 2}, "model": model}).canonical_json()


def stop_command(
    attempt: int, *, job_id: str = "job", graceful: bool = False, timeout_s: float = 5.0
) -> agents_pb2.Command:
    return agents_pb2.Command(
        job_id=job_id,
        attempt=attempt,
        stop_workers=agents_pb2.StopWorkers(graceful=graceful, timeout_s=timeout_s),
    )


def start_job(controller: FakeController, attempt: int = 1) -> None:
    """Have the agent start an attempt; it must."""
    wait_for(lambda: controller.hellos, "a hello")
    result = controller.result(controller.command(start_command(attempt)))
    assert result.ok, result
