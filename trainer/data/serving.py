"""The loader process of a node: reads each step once, for all ranks there that train on it.

It has no state to lose: which step is wanted comes with every request, and which parts of it. Ranks
that take no tokens get memory without any, and none are read for them. What it has read of a
replica's step stays in shared memory while other ranks may still ask for it, and the steps behind
are read before anybody asks. One thread does it all: a request comes before reading ahead.

What does not belong here: starting this process and watching it, which the agent does.
"""

from __future__ import annotations

import os
import select
import socket
from collections import deque
from collections.abc import Mapping
from mmap import mmap
from typing import NamedTuple

from trainer.data.loader import Split
from trainer.data.node import GREETING, MAX_REASON_BYTES, READY, REQUEST
from trainer.data.step_batch import Parts


class _Key(NamedTuple):
    split: int
    step: int
    replica: int
    parts: Parts


class Server:
    """Answers ranks until it is told to end, or for as long as its process lives."""

    def __init__(
        self,
        listening: socket.socket,
        splits: Mapping[int, Split],
        *,
        steps_ahead: int,
        last_steps: Mapping[int, int],
    ) -> None:
        """`last_steps` are those behind which nothing is read ahead."""
        self._listening = listening
        self._splits = splits
        self._steps_ahead = steps_ahead
        self._last_steps = last_steps
        self._poll = select.poll()
        self._poll.register(listening, select.POLLIN)
        self._wake, self._waker = socket.socketpair()
        self._poll.register(self._wake, select.POLLIN)
        self._ranks: dict[int, socket.socket] = {}
        # Descriptors of what has been read.
        self._read: dict[_Key, int] = {}
        self._ahead: deque[_Key] = deque()
        self.num_reads = 0

    def serve(self) -> None:
        """Answer requests until `end` is called."""
        while True:
            events = self._poll.poll(0 if self._ahead else None)
            for handle, _ in events:
                if handle == self._wake.fileno():
                    return
                if handle == self._listening.fileno():
                    self._accept()
                else:
                    self._serve_rank(handle)
            if not events:
                self._read_ahead()

    def end(self) -> None:
        """Have `serve` return; to be called from another thread."""
        self._waker.send(b"\0")

    def close(self) -> None:
        """Let go of all memory and connections, the listening socket excepted."""
        for rank in (*self._ranks.values(), self._wake, self._waker):
            rank.close()
        for descriptor in self._read.values():
            os.close(descriptor)
        self._ranks, self._read = {}, {}

    def _accept(self) -> None:
        rank, _ = self._listening.accept()
        # One that does not read its answers is not waited for.
        rank.setblocking(False)
        try:
            rank.send(GREETING)
        except OSError:
            # It has gone meanwhile.
            rank.close()
            return
        self._ranks[rank.fileno()] = rank
        self._poll.register(rank, select.POLLIN)

    def _serve_rank(self, handle: int) -> None:
        rank = self._ranks[handle]
        try:
            request = rank.recv(REQUEST.size)
            if len(request) < REQUEST.size:
                raise ConnectionResetError
            self._answer(rank, REQUEST.unpack(request))
        except OSError:
            self._poll.unregister(handle)
            del self._ranks[handle]
            rank.close()

    def _answer(self, rank: socket.socket, request: tuple[int, ...]) -> None:
        split, step, replica, parts = request
        try:
            key = _Key(split, step, replica, Parts(parts))
            descriptor = self._descriptor(key)
        # Whatever it is, the rank reads by itself then, meets it, too, and says where.
        except Exception as error:  # noqa: BLE001
            rank.send(f"{type(error).__name__}: {error}".encode()[:MAX_REASON_BYTES])
            return
        socket.send_fds(rank, [READY], [descriptor])
        self._move_on(key)

    def _descriptor(self, key: _Key) -> int:
        """Of memory with a batch in it, which is read now unless it has been."""
        if key not in self._read:
            self.num_reads += 1
            descriptor = os.memfd_create("outlast-data", os.MFD_CLOEXEC)
            self._read[key] = descriptor

            def allocate(num_bytes: int) -> mmap:
                os.ftruncate(descriptor, num_bytes)
                return mmap(descriptor, num_bytes)

            try:
                split = self._splits[key.split]
                split.read(key.step, key.replica, key.parts, allocate=allocate)
            except BaseException:
                os.close(self._read.pop(key))
                raise
        return self._read[key]

    def _move_on(self, key: _Key) -> None:
        """Drop what ranks like this one need no more, and have the steps behind read."""
        # Ranks of a replica are a step apart at most.
        kept = range(key.step - 1, key.step + self._steps_ahead + 1)

        def is_over(other: _Key) -> bool:
            return other._replace(step=key.step) == key and other.step not in kept

        for other in list(filter(is_over, self._read)):
            os.close(self._read.pop(other))
        # Where requests left no time to read ahead, steps wait that nobody will ask for.
        self._ahead = deque(other for other in self._ahead if not is_over(other))
        last = min(key.step + self._steps_ahead, self._last_steps[key.split])
        for step in range(key.step + 1, last + 1):
            wanted = key._replace(step=step)
            if wanted not in self._read and wanted not in self._ahead:
                self._ahead.append(wanted)

    def _read_ahead(self) -> None:
        key = self._ahead.popleft()
        try:
            self._descriptor(key)
        # Who asks for it will be told.
        except Exception:  # noqa: BLE001
            return
