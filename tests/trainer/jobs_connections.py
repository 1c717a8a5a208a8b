"""What ranks do to their own connections in tests."""

from __future__ import annotations

import socket
from typing import Any

from tests.trainer.ranks import RankContext
from trainer.parallel.connections import EndedConnections

# More than the kernel keeps for a connection of which nobody reads.
_SENT_BYTES = 64 << 20
_DEADLINE_S = 30.0


def end_and_drain(context: RankContext) -> dict[str, Any]:
    """All TCP of this process is ended, except for listeners; peers may still send."""
    listener = socket.create_server(("127.0.0.1", 0))
    theirs = socket.create_connection(listener.getsockname(), timeout=_DEADLINE_S)
    ours = listener.accept()[0]
    connections = EndedConnections()
    connections.look()
    woken = ours.recv(1)
    ours.close()
    # Beside the thread that reads, nothing but what is held keeps the connection.
    sent = 0
    theirs.setblocking(False)
    piece = bytes(1 << 20)
    while sent < _SENT_BYTES:
        try:
            sent += theirs.send(piece)
        except BlockingIOError:
            connections.drain()
    later = socket.create_connection(listener.getsockname(), timeout=_DEADLINE_S)
    connections.close()
    return {"woken": woken, "sent": sent, "accepts": later.getpeername()[1] > 0}
