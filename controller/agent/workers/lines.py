"""The agent's end of the lines to workers that can leave their attempt and live on.

A worker connects as it starts; until then, and where it has ended, nothing can be said to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Callable

from controller.agent.mistakes import Mistakes
from outlast.worker_line import (
    MAX_LINE_BYTES,
    FromAgent,
    Left,
    address_of,
    from_agent,
    peer_pid,
    read_from_worker,
)


class WorkerLines:
    """One listener, and a connection for each worker."""

    def __init__(self, left: Callable[[int, Left], None], mistakes: Mistakes) -> None:
        """`left` hears from a process that it has left an attempt."""
        self.address = address_of(f"{os.getpid()}-{secrets.token_hex(8)}")
        self._left = left
        self._mistakes = mistakes
        self._server: asyncio.Server | None = None
        # By pid.
        self._lines: dict[int, asyncio.StreamWriter] = {}

    async def start(self) -> None:
        """Listen from now on, if it does not yet."""
        if self._server is not None:
            return
        self._server = await asyncio.start_unix_server(
            self._serve, self.address, limit=MAX_LINE_BYTES
        )

    def say(self, pid: int, message: FromAgent) -> bool:
        """Say something to a worker; whether there was a line to it."""
        line = self._lines.get(pid)
        if line is None or line.is_closing():
            return False
        line.write(from_agent(message))
        return True

    def close(self) -> None:
        """Hear nothing any more."""
        if self._server is not None:
            self._server.close()
        for line in self._lines.values():
            line.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found: socket.socket = writer.get_extra_info("socket")
        pid = peer_pid(found)
        self._lines[pid] = writer
        try:
            with contextlib.suppress(ConnectionError):
                while text := await reader.readline():
                    self._left(pid, read_from_worker(text))
        except ValueError as error:
            self._mistakes.note("line", f"to pid {pid}", error)
        finally:
            if self._lines.get(pid) is writer:
                del self._lines[pid]
            writer.close()
