"""Messages of an agent, as they should be and with fields that make no sense."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outlast.v1 import agents_pb2, common_pb2, diagnostics_pb2
from tests.diagnostics.spoken import message_from

REALS = (
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    -1.0,
    1e-320,
    1e308,
    -1e308,
    2.0**53,
    2.0**63,
    3_600.0,
    1.8e9,
)
INT64S = (0, 1, -1, 2, 7, 10, 11, 2**31, 2**53 - 1, 2**53, 2**62, 2**63 - 1, -(2**63))
INT32S = (0, 1, -1, 2, 13, 65_536, 2**20, 2**31 - 1, -(2**31))
TEXTS = (
    "",
    "x",
    "a" * 300,
    "b" * 70_000,
    "../../etc/passwd",
    "\x00\x1b[31m\n\r",
    "n0",
    "n1",
    "n7",
    "tiny-000000",
    "pass",
    "fail",
    "kernel_log",
    "storage",
    "load",
    "\U0001d54c\U0010ffff\u202e",
    '{"is": "JobPut"}',
    "%s%n%d",
    "T",
)

_INT64 = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
_REAL = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def is_repeated(found: FieldDescriptor) -> bool:
    """Whether a field is a list."""
    return bool(found.label == FieldDescriptor.LABEL_REPEATED)


def value_for(found: FieldDescriptor, choice: random.Random) -> object:
    """A value of the field's type, as a rule one that it should not have."""
    if found.cpp_type in _REAL:
        return choice.choice(REALS)
    if found.cpp_type in _INT64:
        return choice.choice(INT64S)
    if found.cpp_type == FieldDescriptor.CPPTYPE_INT32:
        return choice.choice(INT32S)
    if found.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return choice.random() < 0.5
    if found.type == FieldDescriptor.TYPE_BYTES:
        return bytes(choice.getrandbits(8) for _ in range(choice.choice((0, 1, 100))))
    return choice.choice(TEXTS)


def mutate(message: Message, choice: random.Random) -> None:
    """Change one field somewhere in a message, in place."""
    found = choice.choice(message.DESCRIPTOR.fields)
    if found.message_type is not None and found.message_type.GetOptions().map_entry:
        _mutate_map(message, found, choice)
    elif is_repeated(found):
        _mutate_repeated(message, found, choice)
    elif found.message_type is None:
        if choice.random() < 0.1:
            message.ClearField(found.name)
        else:
            setattr(message, found.name, value_for(found, choice))
    elif message.HasField(found.name) or choice.random() < 0.05:
        inner = getattr(message, found.name)
        inner.SetInParent()
        mutate(inner, choice)
    else:
        # Nearly always the member of a oneof that is not the one that is set.
        present = [each for each, _ in message.ListFields() if each.message_type is not None]
        singular = [each for each in present if not is_repeated(each)]
        if singular:
            mutate(getattr(message, choice.choice(singular).name), choice)


def _mutate_map(message: Message, found: FieldDescriptor, choice: random.Random) -> None:
    pairs = getattr(message, found.name)
    values = found.message_type.fields_by_name["value"]
    for _ in range(choice.choice((1, 1, 1, 3, 3, 300))):
        pairs[f"{choice.choice(TEXTS)[:300]}{choice.randrange(600)}"] = value_for(values, choice)


def _mutate_repeated(message: Message, found: FieldDescriptor, choice: random.Random) -> None:
    values = getattr(message, found.name)
    if found.message_type is None:
        values.extend(value_for(found, choice) for _ in range(choice.choice((1, 3, 100))))
    elif values and choice.random() < 0.8:
        mutate(choice.choice(values), choice)
    else:
        for _ in range(choice.choice((1, 3))):
            mutate(values.add(), choice)


class Sender:
    """What a node may say, about the attempt that it was told to run."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.incarnation = f"{node}x1"
        self.seq = 0
        self.step = 0
        # By rank, what it was told to run.
        self.running: dict[int, tuple[str, int]] = {}
        self.last_command = ""

    def hello(self) -> agents_pb2.AgentMessage:
        hello = agents_pb2.Hello(
            node_id=self.node,
            incarnation=self.incarnation,
            address="127.0.0.1",
            rendezvous_port=4242,
            workers=2,
            version="0",
            metrics_address="127.0.0.1:1",
            replica_port=1,
            replica_token="t",
            worker_statuses=[
                agents_pb2.WorkerStatus(job_id=job, attempt=attempt, rank=rank, running=True)
                for rank, (job, attempt) in self.running.items()
            ],
        )
        return agents_pb2.AgentMessage(hello=hello)

    def event(self, event: agents_pb2.AgentEvent) -> agents_pb2.AgentMessage:
        self.seq += 1
        event.seq, event.at_s = self.seq, time.time()
        return agents_pb2.AgentMessage(event=event)

    def answer(self, command: agents_pb2.Command) -> agents_pb2.AgentMessage:
        """As a healthy node carries a command out."""
        self.last_command = command.command_id
        result = agents_pb2.CommandResult(command_id=command.command_id, ok=True, completed_step=-1)
        match command.WhichOneof("kind"):
            case "start_workers":
                for rank in command.start_workers.ranks:
                    self.running[rank] = (command.job_id, command.attempt)
                self.step = max(0, self.step)
            case "stop_workers":
                self.running.clear()
                result.completed_step = self.step
            case "run_suite":
                result.findings.add(test="device", node=self.node, verdict="pass", value=1.0)
        return self.event(
            agents_pb2.AgentEvent(
                job_id=command.job_id, attempt=command.attempt, command_result=result
            )
        )

    def progress(self, step: int) -> agents_pb2.AgentMessage:
        made = agents_pb2.ProgressMade(
            completed_step=step,
            resumed_step=0,
            completed_at_s=time.time(),
            start_split_s={"fork": 0.01, "first_step": 0.2},
            environment={"torch": "2", "device": "cpu"},
        )
        return self._of_job(progress=made)

    def own_exit(self) -> agents_pb2.AgentMessage:
        """One of its workers is killed."""
        rank, _, _ = self._job()
        exit_ = agents_pb2.WorkerExit(code=-9, completed_step=1, at_s=time.time())
        return self._of_job(worker_exited=agents_pb2.WorkerExited(rank=rank, exit=exit_))

    def any(self, choice: random.Random) -> agents_pb2.AgentMessage:
        """Something that a healthy node might say just now."""
        makers: tuple[Callable[[random.Random], agents_pb2.AgentMessage], ...] = (
            self._heartbeat,
            self._heartbeat,
            self._steps,
            self._steps,
            self._exit,
            self._checkpoint,
            self._trouble,
            self._progress,
            self._sign,
            self._result,
            self._log,
            self._report,
        )
        return choice.choice(makers)(choice)

    def _job(self) -> tuple[int, str, int]:
        for rank, (job, attempt) in self.running.items():
            return rank, job, attempt
        return 0, "tiny-000000", 1

    def _of_job(self, **kind: Message) -> agents_pb2.AgentMessage:
        _, job, attempt = self._job()
        return self.event(agents_pb2.AgentEvent(job_id=job, attempt=attempt, **kind))

    def _heartbeat(self, choice: random.Random) -> agents_pb2.AgentMessage:
        rank, job, attempt = self._job()
        summary = agents_pb2.RankSummary(
            job_id=job,
            attempt=attempt,
            rank=rank,
            phase="forward_backward",
            completed_step=self.step,
            resumed_step=0,
            last_operation=message_from("in dp all_reduce #3"),
            last_op_age_s=0.01,
            step_age_s=0.1,
            stalled_s=0.1,
            stall_limit_s=60.0,
            stall_limit_source="ours",
            entered={"dp": 3},
            process_state="R",
            use=agents_pb2.RankUse(
                split=common_pb2.StepSplit(forward_s=0.1, backward_s=0.2, data_s=0.01),
                pipeline_busy_s=0.1,
                peak_memory_bytes=10**9,
            ),
        )
        beat = agents_pb2.Heartbeat(seq=1, at_s=time.time(), ranks=[summary])
        return agents_pb2.AgentMessage(heartbeat=beat)

    def _steps(self, choice: random.Random) -> agents_pb2.AgentMessage:
        self.step = self.step % 10 + 1
        report = common_pb2.StepReport(
            step=self.step, loss=2.0, grad_norm=1.0, tokens=100, duration_s=0.1, at_s=time.time()
        )
        return self._of_job(step_reports=agents_pb2.StepReports(reports=[report]))

    def _exit(self, choice: random.Random) -> agents_pb2.AgentMessage:
        rank, _, _ = self._job()
        # Of a rank of another node, mostly: one of its own costs an attempt.
        if choice.random() < 0.97:
            rank += 1
        exit_ = agents_pb2.WorkerExit(
            code=-9, traceback='File "x.py", line 1, in f', completed_step=1, at_s=time.time()
        )
        return self._of_job(worker_exited=agents_pb2.WorkerExited(rank=rank, exit=exit_))

    def _checkpoint(self, choice: random.Random) -> agents_pb2.AgentMessage:
        committed = agents_pb2.CheckpointCommitted(
            step=self.step, size_bytes=10, upload_s=0.1, total_s=0.2, stalled_s=0.1
        )
        return self._of_job(checkpoint_committed=committed)

    def _trouble(self, choice: random.Random) -> agents_pb2.AgentMessage:
        trouble = agents_pb2.CheckpointTrouble(step=self.step, stage="upload", detail="ENOSPC")
        return self._of_job(checkpoint_trouble=trouble)

    def _progress(self, choice: random.Random) -> agents_pb2.AgentMessage:
        return self.progress(self.step)

    def _sign(self, choice: random.Random) -> agents_pb2.AgentMessage:
        sign = agents_pb2.HostSign(subject="disk", what="/tmp", message="full")
        return self._of_job(host_sign=sign)

    def _result(self, choice: random.Random) -> agents_pb2.AgentMessage:
        result = agents_pb2.CommandResult(
            command_id=self.last_command or "x",
            ok=True,
            findings=[diagnostics_pb2.Finding(test="device", verdict="pass")],
            stacks=[agents_pb2.RankStacks(rank=0, location="f", text="x")],
        )
        return self._of_job(command_result=result)

    def _log(self, choice: random.Random) -> agents_pb2.AgentMessage:
        chunk = agents_pb2.LogChunk(query_id="q", data=b"x")
        return agents_pb2.AgentMessage(log_chunk=chunk)

    def _report(self, choice: random.Random) -> agents_pb2.AgentMessage:
        report = agents_pb2.CheckReport(
            order_id="order/1",
            begun=True,
            findings=[diagnostics_pb2.Finding(test="pair", metric="m", value=1.0)],
        )
        return agents_pb2.AgentMessage(check_report=report)
