"""How copies of slots travel between agents: messages, and payloads with their checksums.

    message   4 bytes of length, 8 bytes of checksum, JSON text
    payload   the slot's bytes, straight from host memory (`sendfile`) and into it, then a
              message with the checksum of each block, as the sender's slot has them

A connection begins with a `hello` that names the receiver's token, the job and the
attempt, and is then a sequence of requests: `put` gives a copy, `list` asks what there is,
`get` asks for a copy. Every wait ends at the connection's timeout, every payload at a
deadline. Damage on the way is found by the checksums; they are no protection against
forgery. Where the controller encrypts, agents do (`encryption`); else the port belongs on
the cluster's own network.

What does not belong here: who gives what to whom, and where copies lie.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from checkpoint.checksums import CHECKSUM, block_checksum
from checkpoint.core.blocks import blocks_of
from checkpoint.core.pacing import Pace
from checkpoint.core.slots import UploadState
from checkpoint.replicas.encryption import Encryption, WrongAgentError, dialled
from checkpoint.stage.slot_sums import Verifier, damaged, ensure_sums, store_sums
from checkpoint.stage.slotfile import PAYLOAD_AT, Seal, SlotFile
from outlast.errors import RetryableError

# Silence after which the other side counts as gone: far above a scheduling pause or a lost
# packet, far below the time in which a step is worth keeping.
SILENCE_S = 10.0
# A payload that arrives more slowly than this is given up, unless the limit asks for it.
_LEAST_BYTES_PER_S = 16 << 20
_GRACE_S = 20.0
# A shard table of 10,000 tensors has 3 MB.
_MAX_MESSAGE_BYTES = 64 << 20
_FRAME = struct.Struct("<IQ")


class ReplicaError(RetryableError):
    """A copy did not get through; the next one may."""


class StaleReplicaError(ReplicaError):
    """It belongs to an attempt, or to a placement, that is not the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another agent's replica port."""

    node: str
    address: str
    port: int
    token: str


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """What a copy is of; a later attempt counts as newer, whatever the step."""

    attempt: int
    step: int


class Line:
    """One connection between agents. Closed by `with`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def encrypt(self, encryption: Encryption) -> None:
        """Go on encrypted, as the one who was called.

        Raises:
            OSError: the other side does something else.
        """
        self._socket = encryption.accepted(self._socket)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hang_up(self) -> None:
        """Have what another thread does on this line fail; that thread closes it.

        Closed under it, the descriptor's number may be another file's by the time that TLS writes
        a last time.
        """
        # It may have ended by itself. An SSLSocket's own would take TLS away from the other thread.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up, as the thread that uses the line."""
        self.hang_up()
        self._socket.close()

    def send(self, message: dict[str, object]) -> None:
        """Raises OSError when the other side is gone."""
        text = json.dumps(message).encode()
        self._socket.sendall(_FRAME.pack(len(text), block_checksum(CHECKSUM, text)) + text)

    def receive(
        self, within_s: float = SILENCE_S, *, max_bytes: int = _MAX_MESSAGE_BYTES
    ) -> dict[str, object] | None:
        """The next message, if it begins in time; None when the other side has hung up.

        Raises:
            ReplicaError: it is damaged.
            OSError: the other side is gone, or silent for too long.
        """
        head = bytearray(_FRAME.size)
        self._socket.settimeout(within_s)
        try:
            if not self._fill(memoryview(head), may_end=True):
                return None
        finally:
            self._socket.settimeout(SILENCE_S)
        size, checksum = _FRAME.unpack(head)
        if size > max_bytes:
            raise ReplicaError(f"a message of {size} bytes; at most {max_bytes}")
        text = bytearray(size)
        self._fill(memoryview(text))
        if block_checksum(CHECKSUM, text) != checksum:
            raise ReplicaError("a message does not fit its checksum")
        try:
            document: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReplicaError(f"a message is no JSON: {error}") from error
        if not isinstance(document, dict):
            raise ReplicaError(f"a message is a {type(document).__name__}")
        return document

    def ask(self, message: dict[str, object]) -> dict[str, object]:
        """The answer to a request.

        Raises:
            ReplicaError: the other side refused, and why.
            OSError: the other side is gone, or silent for too long.
        """
        self.send(message)
        answer = self.receive()
        if answer is None:
            raise ReplicaError("the other agent hung up")
        if answer.get("ok") is not True:
            kind = StaleReplicaError if answer.get("stale") else ReplicaError
            raise kind(str(answer.get("why", "refused")))
        return answer

    def send_payload(
        self, slot: SlotFile, pace: Pace, pause: Callable[[float], bool], deadline_s: float
    ) -> int:
        """Send a slot's payload and its checksums; returns how many bytes that were.

        Every block is compared with the slot's checksums before it goes. The slot is locked.
        `pause` waits, and says whether to give up; `deadline_s` is on the monotonic clock.

        Raises:
            DamagedMemoryError: a block does not fit; the receiver does not get the checksums.
        """
        sums = ensure_sums(slot)
        assert sums is not None, "nobody overwrites a slot that is locked"
        verifier = Verifier(slot, sums)
        sent = slot.payload_bytes
        with _another_handle(slot) as file:
            for start, end in blocks_of(sent, slot.owned_bytes):
                verifier.through(end)
                wait_s = pace.delay_s(end - start, time.monotonic())
                if time.monotonic() + wait_s > deadline_s:
                    raise ReplicaError(f"not sent in time: {start} of {sent} bytes")
                if wait_s and pause(wait_s):
                    raise ReplicaError("stopped")
                self._socket.sendfile(file, PAYLOAD_AT + start, end - start)
        self.send({"checksums": sums})
        return sent

    def receive_payload(self, slot: SlotFile, deadline_s: float) -> tuple[int, ...]:
        """Fill a slot's payload; returns the checksums of its blocks. The slot is not sealed.

        Raises:
            ReplicaError: a block does not fit its checksum, or came too late.
        """
        checksums = []
        with slot.payload as payload:
            for start, end in blocks_of(slot.payload_bytes, slot.owned_bytes):
                with payload[start:end] as block:
                    self._fill(block)
                    checksums.append(block_checksum(CHECKSUM, block))
                if time.monotonic() > deadline_s:
                    raise ReplicaError(f"not received in time: {start} of {len(payload)} bytes")
        trailer = self.receive()
        if trailer is None or trailer.get("checksums") != checksums:
            raise ReplicaError(f"rank {slot.rank}: a copy does not fit its checksums")
        return tuple(checksums)

    def _fill(self, room: memoryview, *, may_end: bool = False) -> bool:
        filled = 0
        while filled < len(room):
            count = self._socket.recv_into(room[filled:])
            if count == 0:
                if may_end and filled == 0:
                    return False
                raise ReplicaError("the other agent hung up in the middle")
            filled += count
        return True


def connect(peer: Peer, job_id: str, attempt: int) -> Line:
    """A line to another agent, as this attempt of the job.

    Raises:
        ReplicaError: it does not know us, or not this attempt.
        OSError: it cannot be reached.
    """
    connection = socket.create_connection((peer.address, peer.port), timeout=SILENCE_S)
    try:
        line = Line(dialled(connection, peer.token))
    except WrongAgentError as error:
        raise ReplicaError(f"{peer.node}: {error}") from error
    except BaseException:
        connection.close()
        raise
    try:
        line.ask({"kind": "hello", "token": peer.token, "job": job_id, "attempt": attempt})
    except BaseException:
        line.close()
        raise
    return line


def time_allowed_s(nbytes: int, bytes_per_s: float | None) -> float:
    """How long a payload of `nbytes` may take, twice what its rate allows for."""
    rate = min(_LEAST_BYTES_PER_S, bytes_per_s or _LEAST_BYTES_PER_S)
    return _GRACE_S + 2 * nbytes / rate


def describe(slot: SlotFile, table: str) -> dict[str, object]:
    """What a receiver must know of a slot besides its payload.

    Raises:
        DamagedMemoryError: `extra` is not what was sealed.
    """
    facts = slot.read()
    try:
        extra = slot.extra().decode()
    except ValueError as error:
        raise damaged(slot, str(error)) from error
    return {
        "rank": slot.rank,
        "attempt": facts.attempt,
        "step": facts.step,
        "digest": slot.table_digest,
        "sealed_at_ns": slot.sealed_at_ns,
        "extra": extra,
        "table": table,
    }


def seal_copy(slot: SlotFile, described: dict[str, object], sums: Sequence[int]) -> None:
    """Make a received payload a whole slot, by what its sender said of it.

    `sums` are the checksums that came with it, and that it was compared with.
    """
    slot.seal(
        Seal(
            rank=number(described, "rank"),
            attempt=number(described, "attempt"),
            step=number(described, "step"),
            table_digest=number(described, "digest"),
            sealed_at_ns=number(described, "sealed_at_ns"),
            upload=UploadState.NONE,
        ),
        text(described, "extra").encode(),
    )
    store_sums(slot, slot.seal_id, sums)


def number(message: dict[str, object], name: str) -> int:
    """A count out of a message; ReplicaError when it is none."""
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ReplicaError(f"{name} is {value!r}, not a count")
    return value


def text(message: dict[str, object], name: str) -> str:
    """Text out of a message; ReplicaError when it is none."""
    value = message.get(name)
    if not isinstance(value, str):
        raise ReplicaError(f"{name} is {value!r}, not text")
    return value


def _another_handle(slot: SlotFile) -> BinaryIO:
    """The slot's file, open whatever becomes of the slot."""
    handle = os.dup(slot.fileno())
    try:
        return open(handle, "rb")
    except OSError:
        os.close(handle)
        raise
