"""Keeps copies of other nodes' slots, and hands out slots to a node that has lost its own.

One listening socket and a thread per connection, in the agent. Copies are slots like any
other, under the job's host memory, two for each rank: one that is whole while the next
arrives. A copy counts when its commit word is stored, after every checksum has been
compared, so that whoever is killed in the middle leaves the one before.

An attempt that is not the present one is turned away when it says hello, and again before
what it has sent is sealed.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.core import names
from checkpoint.core.checked_json import RecordError
from checkpoint.core.pacing import Pace
from checkpoint.core.shards import ShardTable
from checkpoint.core.slots import NUM_HELD_SLOTS, choose_held
from checkpoint.errors import DamagedMemoryError
from checkpoint.replicas.encryption import Encryption
from checkpoint.replicas.wire import (
    Copy,
    Line,
    ReplicaError,
    StaleReplicaError,
    describe,
    number,
    seal_copy,
    text,
    time_allowed_s,
)
from checkpoint.stage import allocation, slotfile
from checkpoint.stage.damage import refuse
from checkpoint.stage.slotfile import SlotFile
from outlast.errors import FatalError

logger = logging.getLogger(__name__)

# Of a connection on which nobody asks for anything: steps may be far apart.
_IDLE_S = 3600.0
# The first message of a peer, before it has shown the token.
_MAX_HELLO_BYTES = 4096
# A node gives to one node and is asked by a few; anything more is not us.
_MAX_CONNECTIONS = 64
# After a connection that could not be taken.
_RETRY_S = 0.2
# Who accepts looks so often whether it is over: a shutdown that fails does not wake it.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """What this node keeps for a job now, and for which attempt."""

    attempt: int
    ranks: frozenset[int]
    bytes_per_s: float | None


class Holder:
    """The replica port of a node. `memory_dir` is the root of its host memory."""

    def __init__(
        self, memory_dir: Path, address: str, token: str, encryption: Encryption | None = None
    ) -> None:
        """`token` is what who connects must have; with `encryption`, one that it has made."""
        self._memory_dir = memory_dir
        self._token = token
        self._encryption = encryption
        self._duties: dict[str, Duty] = {}
        self._lines: set[Line] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.received_bytes = 0
        self.outcomes = Counter[str]()
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._listening = socket.create_server((target[0], 0), family=family)
        self._listening.settimeout(_LOOK_S)
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._listen, name="replica-listen", daemon=True).start()

    def take_duty(self, job_id: str, duty: Duty) -> None:
        """Keep these copies from now on, and none of an older attempt or placement."""
        with self._lock:
            known = self._duties.get(job_id)
            if known is not None and known.attempt > duty.attempt:
                return
            self._duties[job_id] = duty
        folder = self._memory_dir / job_id / names.REPLICAS
        wanted = {Path(names.replica_folder(rank)).name for rank in duty.ranks}
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in wanted:
                shutil.rmtree(path, ignore_errors=True)
                logger.info("copies are not kept here any more: job=%s %s", job_id, path.name)

    def forget(self, job_id: str) -> None:
        """Take no more copies of a job; whoever frees its host memory frees them, too."""
        with self._lock:
            self._duties.pop(job_id, None)

    def newest_copies(self) -> dict[tuple[str, int], Copy]:
        """The newest whole copy of every rank that is kept here, by job and rank."""
        with self._lock:
            duties = dict(self._duties)
        found = {}
        for job_id, duty in duties.items():
            for rank in duty.ranks:
                copies = _copies(self._memory_dir / job_id / names.replica_folder(rank))
                if copies:
                    found[job_id, rank] = max(copies)
        return found

    def close(self) -> None:
        """Hang up on everybody."""
        self._closing.set()
        # Closing alone does not wake who accepts.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.hang_up()

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                self._accept()
            except TimeoutError:
                continue
            except (OSError, RuntimeError) as error:
                if self._closing.is_set():
                    return
                # No descriptors or threads are left: there may be some again in a while, and
                # without this thread no copy would ever arrive here any more.
                logger.warning("replica connection not taken: %s; tried again", error)
                self._closing.wait(_RETRY_S)

    def _accept(self) -> None:
        connection, _ = self._listening.accept()
        try:
            with self._lock:
                is_full = len(self._lines) >= _MAX_CONNECTIONS
            if is_full:
                connection.close()
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="replica-serve", daemon=True
            ).start()
        except BaseException:
            connection.close()
            raise

    def _serve(self, connection: socket.socket) -> None:
        line = Line(connection)
        with self._lock:
            self._lines.add(line)
        try:
            with line:
                if self._encryption is not None:
                    line.encrypt(self._encryption)
                visitor = self._greet(line)
                if visitor is not None:
                    visitor.serve()
        except (ReplicaError, OSError, ValueError) as error:
            logger.info("replica connection ended: %s", error)
        finally:
            with self._lock:
                self._lines.discard(line)

    def _greet(self, line: Line) -> _Visitor | None:
        hello = line.receive(max_bytes=_MAX_HELLO_BYTES)
        if hello is None or hello.get("kind") != "hello":
            return None
        if not hmac.compare_digest(text(hello, "token").encode(), self._token.encode()):
            line.send({"ok": False, "why": "the token is not this agent's"})
            return None
        visitor = _Visitor(self, line, text(hello, "job"), number(hello, "attempt"))
        try:
            visitor.duty()
        except ReplicaError as error:
            self.outcomes["refused"] += 1
            line.send(_refusal(error))
            return None
        line.send({"ok": True})
        return visitor

    def duty_of(self, job_id: str) -> Duty | None:
        """What is kept for a job now."""
        with self._lock:
            return self._duties.get(job_id)

    def job_dir(self, job_id: str) -> Path:
        return self._memory_dir / job_id


@dataclass(slots=True)
class _Visitor:
    """One connection, by one attempt of one job."""

    holder: Holder
    line: Line
    job_id: str
    attempt: int
    _open: dict[int, list[SlotFile]] = field(default_factory=dict)

    def duty(self) -> Duty:
        """What this node keeps for the visitor's job; raises when its attempt is not current."""
        duty = self.holder.duty_of(self.job_id)
        if duty is None or duty.attempt < self.attempt:
            raise ReplicaError(f"attempt {self.attempt} of {self.job_id} has not begun here")
        if duty.attempt > self.attempt:
            raise StaleReplicaError(
                f"attempt {self.attempt} of {self.job_id} is over: {duty.attempt} has begun"
            )
        return duty

    def serve(self) -> None:
        """Answer requests until the other side hangs up."""
        answers: dict[str, Callable[[dict[str, object]], None]] = {
            "put": self._put,
            "list": self._list,
            "get": self._get,
        }
        try:
            while (request := self.line.receive(_IDLE_S)) is not None:
                answer = answers.get(text(request, "kind"))
                if answer is None:
                    raise ReplicaError(f"request {request.get('kind')!r} is of no known kind")
                try:
                    answer(request)
                except (FatalError, RecordError, StaleReplicaError) as error:
                    # Told, and then hung up: a payload may be on its way behind the request.
                    self.holder.outcomes["refused"] += 1
                    self.line.send(_refusal(error))
                    return
        finally:
            for slots in self._open.values():
                _close(slots)

    def _put(self, request: dict[str, object]) -> None:
        rank = number(request, "rank")
        if rank not in self.duty().ranks:
            raise StaleReplicaError(f"copies of rank {rank} are not kept here")
        slots = self._slots(rank, text(request, "table"))
        copy = Copy(number(request, "attempt"), number(request, "step"))
        digest = number(request, "digest")
        if any(_holds(slot, copy) and slot.table_digest == digest for slot in slots):
            self.line.send({"ok": True, "send": False})
            return
        slot = self._room_for(slots, request)
        try:
            if slot.table_digest != digest:
                raise StaleReplicaError(f"rank {rank}: the copy is of other tensors")
            slot.invalidate()
            self.line.send({"ok": True, "send": True})
            allowed_s = time_allowed_s(len(slot.map), self.duty().bytes_per_s)
            sums = self.line.receive_payload(slot, time.monotonic() + allowed_s)
            self.holder.received_bytes += slot.payload_bytes
            self.duty()
            seal_copy(slot, request, sums)
        except (ReplicaError, OSError):
            self.holder.outcomes["torn"] += 1
            raise
        finally:
            slot.unlock()
        self.holder.outcomes["kept"] += 1
        self.line.send({"ok": True})

    def _room_for(self, slots: list[SlotFile], request: dict[str, object]) -> SlotFile:
        needed = _pairs(request.get("needed"))
        index = choose_held([slot.read() for slot in slots], needed=needed)
        if not slots[index].try_lock(exclusive=True):
            raise StaleReplicaError("the copy's place is being read, or filled by another sender")
        return slots[index]

    def _slots(self, rank: int, table_text: str) -> list[SlotFile]:
        """The places for copies of a rank; the table comes once per connection."""
        if table_text:
            _close(self._open.pop(rank, []))
            table = ShardTable.from_json(table_text.encode())
            folder = self.holder.job_dir(self.job_id) / names.replica_folder(rank)
            self._open[rank] = allocation.prepare(folder, table, num_slots=NUM_HELD_SLOTS)
        if rank not in self._open:
            raise ReplicaError(f"rank {rank}: a copy without its table")
        return self._open[rank]

    def _list(self, request: dict[str, object]) -> None:
        copies = _copies(self._folder(request))
        self.line.send({"ok": True, "copies": [[copy.attempt, copy.step] for copy in copies]})

    def _get(self, request: dict[str, object]) -> None:
        folder = self._folder(request)
        copy = Copy(number(request, "attempt"), number(request, "step"))
        slots = slotfile.open_existing(folder)
        try:
            slot = next((one for one in slots if _holds(one, copy)), None)
            table = slotfile.read_table(folder)
            # Under the lock nobody overwrites it; look again, as somebody may just have.
            if (
                slot is None
                or table is None
                or table.digest != slot.table_digest
                or not slot.try_lock(exclusive=False)
                or not _holds(slot, copy)
            ):
                raise StaleReplicaError(f"step {copy.step} of attempt {copy.attempt} is not here")
            try:
                self.line.send({"ok": True, **describe(slot, table.to_json().decode())})
                allowed_s = time_allowed_s(len(slot.map), None)
                self.line.send_payload(slot, Pace(None), _never, time.monotonic() + allowed_s)
            except DamagedMemoryError as error:
                is_own = request.get("own") is True
                found = error if is_own else error.of_copy()
                refuse(self.holder.job_dir(self.job_id), slot, found)
                raise found from error
        finally:
            _close(slots)

    def _folder(self, request: dict[str, object]) -> Path:
        self.duty()
        rank = number(request, "rank")
        folder = names.memory_folder if request.get("own") is True else names.replica_folder
        return self.holder.job_dir(self.job_id) / folder(rank)


def _pairs(listed: object) -> list[tuple[int, int]]:
    """Attempts with steps, as a request has them.

    Raises:
        ReplicaError: it has something else.
    """
    pairs = []
    for each in listed if isinstance(listed, list) else ():
        match each:
            case [int(attempt), int(step)]:
                pairs.append((attempt, step))
            case _:
                raise ReplicaError(f"needed has {each!r}, which is no attempt with a step")
    return pairs


def _copies(folder: Path) -> list[Copy]:
    """What a folder holds whole, newest first."""
    slots = slotfile.open_existing(folder)
    facts = [slot.read() for slot in slots]
    _close(slots)
    return sorted({Copy(slot.attempt, slot.step) for slot in facts if slot.sealed}, reverse=True)


def _holds(slot: SlotFile, copy: Copy) -> bool:
    facts = slot.read()
    return facts.sealed and Copy(facts.attempt, facts.step) == copy


def _close(slots: list[SlotFile]) -> None:
    for slot in slots:
        slot.close()


def _refusal(error: Exception) -> dict[str, object]:
    return {"ok": False, "why": str(error), "stale": isinstance(error, StaleReplicaError)}


def _never(_: float) -> bool:
    return False
