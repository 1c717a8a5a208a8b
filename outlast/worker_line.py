"""What an agent and a worker of the trainer say to each other while the worker lives.

The agent listens at an abstract Unix address, which is in every worker's contract, and knows a
worker by the pid that the kernel says. A message is a JSON object in a line:

    agent -> worker   {"op": "leave", "attempt": A, "after_step": B}
                                                         give the attempt up, and live on
                      {"op": "join", "contract": {...}}  take part in another attempt
    worker -> agent   {"event": "left", "attempt": A, "completed": B}
                                                         it has no part in this attempt any more

A worker that has left has no connection to others, and nothing under way. What remains is the
process: its imports, the memory of its model and of its slots, and on a GPU its context. It waits
for the next contract, or for SIGKILL.

What does not belong here: who is asked to leave, and when (`controller.agent.core.commands`).
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from outlast.enums import StrEnum
from outlast.worker_contract import WorkerContract

# A contract with the nodes of 100,000 ranks has some megabytes.
MAX_LINE_BYTES = 64 << 20
# struct ucred of <sys/socket.h>: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


class Op(StrEnum):
    """What a message is about."""

    LEAVE = "leave"
    JOIN = "join"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class Left:
    """The worker has no part in this attempt any more; `completed`: its last step is done."""

    attempt: int
    completed: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """Give this attempt up, at once or, as SIGTERM asks, once the present step is complete."""

    attempt: int
    after_step: bool = False


@dataclass(frozen=True, slots=True)
class Join:
    """Take part in the attempt of this contract."""

    contract: WorkerContract


FromAgent = Leave | Join


def address_of(name: str) -> str:
    """The abstract Unix address with this name; it is in no folder, and goes with its listener."""
    return f"\0outlast-{name}"


def connect(address: str) -> socket.socket:
    """The worker's end of the line. Raises OSError: nobody listens there."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.connect(address)
    except OSError:
        line.close()
        raise
    return line


def peer_pid(line: socket.socket) -> int:
    """The process at the other end, as the kernel knows it."""
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(credentials)
    return int(pid)


def from_worker(message: Left) -> bytes:
    """The line with this message."""
    left = {"attempt": message.attempt, "completed": message.completed}
    return _line({"event": Op.LEFT.value, **left})


def from_agent(message: FromAgent) -> bytes:
    """The line with this message."""
    match message:
        case Leave(attempt=attempt, after_step=after_step):
            return _line({"op": Op.LEAVE.value, "attempt": attempt, "after_step": after_step})
        case Join(contract=contract):
            return _line({"op": Op.JOIN.value, "contract": contract.to_env()})


def read_from_worker(line: bytes) -> Left:
    """The message of a line. Raises ValueError: it is none."""
    match _parsed(line):
        case {"event": Op.LEFT.value, "attempt": int(attempt), "completed": bool(completed)}:
            return Left(attempt, completed)
    raise ValueError(f"message of a worker: {line[:200]!r} is none")


def read_from_agent(line: bytes) -> FromAgent:
    """The message of a line. Raises ValueError: it is none."""
    match _parsed(line):
        case {"op": Op.LEAVE.value, "attempt": int(attempt), "after_step": bool(after_step)}:
            return Leave(attempt, after_step)
        case {"op": Op.JOIN.value, "contract": dict(contract)}:
            return Join(WorkerContract.from_env(contract))
    raise ValueError(f"message of an agent: {line[:200]!r} is none")


def _parsed(line: bytes) -> object:
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError(f"a line is nested too deeply: {line[:200]!r}") from error


def _line(document: Mapping[str, object]) -> bytes:
    return json.dumps(document).encode() + b"\n"
