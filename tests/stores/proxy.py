"""A TCP proxy on loopback that breaks things on purpose, for anything that speaks HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from enum import StrEnum

_CHUNK_BYTES = 64 << 10
_METHODS = (b"PUT ", b"GET ", b"POST ", b"HEAD ", b"DELETE ")
_BUSY_BODY = b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>"
_BUSY = (
    b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BUSY_BODY), _BUSY_BODY)
)


class Fault(StrEnum):
    """What happens to requests."""

    NONE = "none"
    BUSY = "busy"  # answered with 503
    DROPPED = "dropped"  # reset in the middle of the request's body
    CUT = "cut"  # the answer ends too soon
    SILENT = "silent"  # taken, and never answered
    SLOW = "slow"  # carried at so many bytes per second


class FaultProxy:
    """Passes connections on to a port; a context manager."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._fault = Fault.NONE
        self._times_left = 0
        self._after_bytes = 0
        self._bytes_per_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_faults = 0
        # Of all connections since the last change of the fault.
        self.sent_bytes = 0
        self.on_sent: Callable[[int], None] = lambda total: None

    def __enter__(self) -> FaultProxy:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="fault-proxy")
        self._thread.start()
        assert ready.wait(10), "the proxy did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def inject(
        self,
        fault: Fault,
        *,
        times: int = 1 << 30,
        after_bytes: int = 0,
        bytes_per_s: float = 0.0,
    ) -> None:
        """Break so many requests from now on; `after_bytes` is how far into one."""
        self._after_bytes, self._bytes_per_s = after_bytes, bytes_per_s
        self._times_left, self._fault = times, fault
        self.num_faults = self.sent_bytes = 0
        self.on_sent = lambda total: None

    def heal(self) -> None:
        """Pass on what comes, and let go of requests that were kept waiting."""
        self.inject(Fault.NONE)
        self._loop.call_soon_threadsafe(self._drop_all)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, "127.0.0.1", 0)
        )
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        self._loop.run_forever()
        server.close()
        self._drop_all()
        self._loop.run_until_complete(self._all_ended())
        self._loop.close()

    async def _all_ended(self) -> None:
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _drop_all(self) -> None:
        for connection in self._connections:
            connection.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            await self._join(reader, writer)
        except (OSError, asyncio.CancelledError):
            _reset(writer)
        finally:
            await _close(writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry both ways until one end has closed."""
        there, to_there = await asyncio.open_connection("127.0.0.1", self._target_port)
        up = asyncio.create_task(self._carry_up(reader, to_there, writer))
        down = asyncio.create_task(self._carry_down(there, writer))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in (up, down):
                part.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            await _close(to_there)

    async def _carry_up(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
    ) -> None:
        num_bytes = 0
        while chunk := await _read(reader):
            num_bytes = 0 if chunk.startswith(_METHODS) else num_bytes
            num_bytes += len(chunk)
            if chunk.startswith(_METHODS) and self._takes(Fault.BUSY):
                client.write(_BUSY)
                await client.drain()
                return
            if num_bytes > self._after_bytes and self._takes(Fault.DROPPED):
                _reset(client)
                return
            if self._takes(Fault.SILENT):
                await asyncio.Event().wait()
            await self._pass(chunk, writer)
            self.sent_bytes += len(chunk)
            self.on_sent(self.sent_bytes)

    async def _carry_down(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        num_bytes = 0
        while chunk := await _read(reader):
            num_bytes = 0 if chunk.startswith(b"HTTP/1.1") else num_bytes
            num_bytes += len(chunk)
            if num_bytes > self._after_bytes and self._takes(Fault.CUT):
                return
            await self._pass(chunk, client)

    async def _pass(self, chunk: bytes, writer: asyncio.StreamWriter) -> None:
        if self._fault is Fault.SLOW:
            await asyncio.sleep(len(chunk) / self._bytes_per_s)
        writer.write(chunk)
        await writer.drain()

    def _takes(self, fault: Fault) -> bool:
        """Whether the fault under way is this one, and hits once more."""
        if self._fault is not fault or self._times_left <= 0:
            return False
        self._times_left -= 1
        self.num_faults += 1
        return True


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(_CHUNK_BYTES)
    except OSError:
        return b""


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
