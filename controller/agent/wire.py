"""What an agent says and hears, between messages and what its machine takes in.

Pure functions: the agent's process calls them, and so do simulated agents.
"""

from __future__ import annotations

from collections.abc import Iterable

from controller.agent.core.inputs import Command
from controller.agent.core.ledger import CommandKind, Result
from outlast.v1 import agents_pb2, diagnostics_pb2

# The first message of a session; the controller takes no more. Controllers of 0.1.0 know no
# inventory, and agents of 0.1.0 send none: the ends of 16 workers fit, each with a traceback and
# 8 KiB of output.
MAX_HELLO_BYTES = 2**18

_KINDS = {
    "start_workers": CommandKind.START,
    "stop_workers": CommandKind.STOP,
    "run_suite": CommandKind.SUITE,
    "forget_job": CommandKind.FORGET,
    "push_checkpoint": CommandKind.PUSH,
}


def data_loader_sign(
    job_id: str, attempt: int, problem: str, *, at_s: float
) -> agents_pb2.AgentEvent:
    """What became of the process that reads data for an attempt's ranks here."""
    message = f"its data loader ended: {problem}" if problem else ""
    sign = agents_pb2.HostSign(
        subject="data_stall", what="its data loader", message=message, spares_node=True
    )
    return agents_pb2.AgentEvent(job_id=job_id, attempt=attempt, at_s=at_s, host_sign=sign)


def introduction(
    hello: agents_pb2.Hello, *, most_bytes: int = MAX_HELLO_BYTES
) -> list[agents_pb2.AgentMessage]:
    """A hello within the bounds of a first message, and what has no room in it."""
    whole = agents_pb2.AgentMessage(hello=hello)
    if whole.ByteSize() <= most_bytes:
        return [whole]
    inventory = agents_pb2.Inventory(worker_statuses=hello.worker_statuses)
    hello.ClearField("worker_statuses")
    hello.inventory_follows = True
    return [
        agents_pb2.AgentMessage(hello=hello),
        agents_pb2.AgentMessage(inventory=inventory),
    ]


def kind_of(command: agents_pb2.Command) -> CommandKind | None:
    """The kind of a command; None for one that this version does not know."""
    return _KINDS.get(command.WhichOneof("kind") or "")


def command_of(command: agents_pb2.Command, kind: CommandKind) -> Command:
    """What decides about a command."""
    is_stop = kind is CommandKind.STOP
    stop = command.stop_workers
    return Command(
        command_id=command.command_id,
        kind=kind,
        job_id=command.job_id,
        attempt=command.attempt,
        graceful=is_stop and stop.graceful,
        timeout_s=stop.timeout_s if is_stop else 0.0,
        capture_stacks=is_stop and stop.capture_stacks,
        keep=is_stop and stop.keep,
        ranks=tuple(command.start_workers.ranks) if kind is CommandKind.START else (),
    )


def answer(
    command: Command,
    result: Result,
    *,
    at_s: float,
    findings: Iterable[diagnostics_pb2.Finding] = (),
    stacks: Iterable[agents_pb2.RankStacks] = (),
) -> agents_pb2.AgentEvent:
    """The answer to a command, with what its steps found on the way."""
    return agents_pb2.AgentEvent(
        job_id=command.job_id,
        attempt=command.attempt,
        at_s=at_s,
        command_result=agents_pb2.CommandResult(
            command_id=command.command_id,
            ok=result.ok,
            detail=result.detail,
            completed_step=result.completed_step,
            error_kind=result.error_kind.value,
            # What a step found before the command failed says nothing for sure.
            findings=findings if result.ok else (),
            stacks=stacks if result.ok else (),
        ),
    )
