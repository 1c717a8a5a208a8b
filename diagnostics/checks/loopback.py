"""TCP over the loopback interface: the host's own network path, data checked.

What is slow or wrong here is the node's memory, CPU or kernel, and no link: a
yardstick for what exchanges with other nodes can give at best.
"""

from __future__ import annotations

import socket
import time

from diagnostics import children
from diagnostics.checks.base import Context, Emit
from diagnostics.checks.storage import count_wrong_bytes
from diagnostics.contention import Contention
from diagnostics.core.finding import Localises, Measurement

_ROUNDS = 4
_TIMEOUT_S = 5.0


def run(context: Context, emit: Emit) -> None:
    """Send a pattern from a child to this process several times; the fastest counts.

    Raises:
        OSError: the connection broke or stood still.
    """
    num_bytes = context.effort.loopback_bytes
    payload = bytes(range(251)) * (num_bytes // 251 + 1)
    payload = payload[:num_bytes]
    started_s = time.monotonic()
    contention = Contention()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT_S)
        address = server.getsockname()
        sender = children.fork(lambda: _send(address, payload))
        try:
            received, _ = server.accept()
            with received:
                received.settimeout(_TIMEOUT_S)
                rounds = [_receive(received, payload) for _ in range(_ROUNDS)]
        finally:
            children.kill(sender)
    what = f"{num_bytes >> 20} MiB over lo, best of {_ROUNDS}"
    duration_s = time.monotonic() - started_s
    emit(
        Measurement(
            test="loopback",
            metric="wrong_bytes",
            value=float(sum(wrong for _, wrong in rounds)),
            unit="bytes",
            localises=Localises.NODE,
            duration_s=duration_s,
            detail=what,
            at_most=0.0,
        )
    )
    emit(
        Measurement(
            test="loopback",
            metric="bandwidth",
            value=num_bytes / 1e9 / max(min(seconds for seconds, _ in rounds), 1e-9),
            unit="GB/s",
            localises=Localises.NODE,
            duration_s=duration_s,
            detail=what,
            baseline_key=f"loopback/{num_bytes}",
            contended_ratio=contention.ratio(),
        )
    )


def _send(address: tuple[str, int], payload: bytes) -> None:
    with socket.create_connection(address, timeout=_TIMEOUT_S) as sending:
        for _ in range(_ROUNDS):
            sending.sendall(payload)
            # The receiver checks the bytes of a round before it takes the next.
            sending.recv(1)


def _receive(received: socket.socket, payload: bytes) -> tuple[float, int]:
    """Seconds and wrong bytes of one round."""
    buffer = bytearray(len(payload))
    view = memoryview(buffer)
    started_s = time.monotonic()
    while view:
        count = received.recv_into(view)
        if count == 0:
            raise ConnectionError(f"the sender left with {len(view)} bytes to go")
        view = view[count:]
    elapsed_s = time.monotonic() - started_s
    wrong = count_wrong_bytes(payload, bytes(buffer))
    received.sendall(b"+")
    return elapsed_s, wrong
