"""The agent's end of the lines of some ranks, for tests without an agent."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Sequence

from outlast.worker_line import (
    FromAgent,
    Left,
    address_of,
    from_agent,
    peer_pid,
    read_from_worker,
)
from tests.checkpoint.helpers import wait_for

DEADLINE_S = 60.0


class AgentLines:
    """Listens, says things to ranks and hears what they say."""

    def __init__(self) -> None:
        self.address = address_of(f"test-{os.getpid()}-{id(self)}")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen()
        self._lines: dict[int, socket.socket] = {}
        self._heard: queue.SimpleQueue[tuple[int, Left]] = queue.SimpleQueue()
        threading.Thread(target=self._accept, daemon=True).start()

    def wait_left(self, pids: Sequence[int]) -> None:
        """Until all of these have left their attempt."""
        waited_for = set(pids)
        while waited_for:
            pid, _ = self._heard.get(timeout=DEADLINE_S)
            waited_for.remove(pid)

    def wait_first_left(self) -> int:
        """Until any has left its attempt; its pid."""
        return self._heard.get(timeout=DEADLINE_S)[0]

    def say(self, pid: int, message: FromAgent) -> None:
        # A rank that has connected may not have been accepted yet.
        wait_for(lambda: pid in self._lines, f"the line of {pid}")
        self._lines[pid].sendall(from_agent(message))

    def close(self) -> None:
        self._listener.close()
        for line in self._lines.values():
            # Its reader has a part in it, and waits.
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(line,), daemon=True).start()

    def _hear(self, line: socket.socket) -> None:
        pid = peer_pid(line)
        self._lines[pid] = line
        for text in line.makefile("rb"):
            self._heard.put((pid, read_from_worker(text)))
