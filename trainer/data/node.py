"""A node's loader process, as its ranks ask it: one reads, and all of the node share what it read.

A rank sends which step of which replica it wants, and which parts of it, and gets the descriptor
of shared memory with a `StepBatch` of these in it. That memory is anonymous, and gone with the last
process that holds it: nothing is left of a loader that was killed, and a rank that has its batch
needs the loader no more.

Training never depends on it. A step's batch follows from its number, so what a rank reads by itself
is the same, bit for bit. It does so while the loader has not come up yet, so that no start waits
for it; when it does not answer in time; and when it is gone for good, or cannot read. One that died
is started again by the agent, which keeps the listening socket: who asks meanwhile waits there.

What does not belong here: reading (`trainer.data.loader.Split`), and the other end
(`trainer.data.serving`).
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from mmap import PROT_READ, mmap
from pathlib import Path

from outlast import local_socket
from trainer.data.loader import Split
from trainer.data.step_batch import Parts, StepBatch

# A loader that was killed is there again after 0.1 s, or a few seconds where it is killed again
# and again. A step that takes longer to read is soon read twice, which does no harm.
ANSWER_S = 10.0
# A loader that is stopped or given up is tried again so much later.
RETRY_S = 30.0


class SplitId(IntEnum):
    """What a step is read of; further held-out sets have the numbers behind the first one's."""

    TRAIN = 0
    EVALUATION = 1


# Split, step, replica, parts.
REQUEST = struct.Struct("<qqqq")
# Nothing but a descriptor comes with it, or the reason for which there is none.
READY = b"\x01"
# What a loader says to each rank that connects.
GREETING = b"\x02"
MAX_REASON_BYTES = 4096


class NodeLoader:
    """One rank's line to the loader of its node."""

    def __init__(
        self,
        path: Path,
        *,
        answer_s: float = ANSWER_S,
        retry_s: float = RETRY_S,
        start_s: float = 0.0,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`path` is of the socket; `say` is told when the loader is gone, or back.

        `start_s` is how long to wait for a loader that has not been there yet.
        """
        self._path = path
        self._answer_s = answer_s
        self._retry_s = retry_s
        self._start_s = start_s
        self._say = _print if say is None else say
        # The thread that reads ahead and the one that trains may both ask.
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        # By the loader at the other end of the connection, and by any.
        self._is_greeted = self._was_greeted = False
        self._retry_at_s = 0.0
        # Why it is missed, as it was said last; "" while it answers.
        self._missed = ""

    def ask(self, split: int, step: int, replica: int, parts: Parts) -> mmap | None:
        """Shared memory with a batch in it; None where the rank had better read by itself."""
        with self._lock:
            if time.monotonic() < self._retry_at_s:
                return None
            return self._ask(REQUEST.pack(split, step, replica, parts))

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._hang_up()

    def _ask(self, request: bytes) -> mmap | None:
        deadline_s = time.monotonic() + self._answer_s
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._do_without(f"it has not answered in {self._answer_s:g} s")
                return None
            try:
                connection = self._connected(left_s)
                if not self._is_there(connection, left_s):
                    return None
                connection.settimeout(left_s)
                connection.send(request)
                found = self._hear(connection)
            except (FileNotFoundError, ConnectionRefusedError):
                self._do_without("the agent does not start it again")
                return None
            except TimeoutError:
                continue
            except OSError as error:
                # It has died with our request; the next one will answer it.
                self._hang_up()
                self._miss(f"it has died ({error}); asking again")
                continue
            if self._missed:
                self._missed = ""
                self._say("the node's data loader answers again")
            return found

    def _connected(self, left_s: float) -> socket.socket:
        if self._connection is None:
            self._is_greeted = False
            self._connection = local_socket.connect(self._path, left_s)
        return self._connection

    def _is_there(self, connection: socket.socket, left_s: float) -> bool:
        """Whether there is a loader; only one that there has been before is waited for."""
        if self._is_greeted:
            return True
        connection.settimeout(left_s if self._was_greeted else self._start_s)
        try:
            said = connection.recv(len(GREETING))
        except (BlockingIOError, TimeoutError):
            if self._was_greeted:
                raise
            return False
        if said != GREETING:
            raise ConnectionResetError("end of the connection")
        self._is_greeted = self._was_greeted = True
        return True

    def _hear(self, connection: socket.socket) -> mmap | None:
        said, descriptors, _, _ = socket.recv_fds(connection, MAX_REASON_BYTES, 1)
        try:
            if not said:
                raise ConnectionResetError("end of the connection")
            if said != READY or not descriptors:
                # The rank will meet what it has met, and say so as its own error.
                return None
            return mmap(descriptors[0], 0, prot=PROT_READ)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _do_without(self, why: str) -> None:
        # What it answers later belongs to nobody.
        self._hang_up()
        self._retry_at_s = time.monotonic() + self._retry_s
        self._miss(f"{why}; this rank reads by itself")

    def _miss(self, why: str) -> None:
        if why != self._missed:
            self._missed = why
            self._say(f"the node's data loader is missed: {why}")

    def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class NodeSource:
    """A split that the node's loader reads, or this process where that one does not."""

    reads_elsewhere = True

    def __init__(self, node: NodeLoader, split: int, own: Split) -> None:
        self._node, self._split, self._own = node, split, own
        self.num_micro_batches = own.num_micro_batches

    def read(self, step: int, replica: int, parts: Parts) -> StepBatch:
        """What a replica reads at a step."""
        memory = self._node.ask(self._split, step, replica, parts)
        if memory is None:
            return self._own.read(step, replica, parts)
        return StepBatch(memory, step=step, replica=replica)

    def close(self) -> None:
        """Hang up."""
        self._node.close()


def _print(text: str) -> None:
    print(f"data: {text}", flush=True)
