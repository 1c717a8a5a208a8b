"""What ranks do to their own connections in tests."""

from __future__ import annotations

import socket
from typing import Any

from tests.trainer.ranks import RankContext
from trainer.parallel.connections import EndedConnections, open_sockets

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


def end_but_some(context: RankContext) -> dict[str, Any]:
    """Connections that are spared go on."""
    listener = socket.create_server(("127.0.0.1", 0))
    pairs = []
    for _ in range(2):
        theirs = socket.create_connection(listener.getsockname(), timeout=_DEADLINE_S)
        pairs.append((theirs, listener.accept()[0]))
        if len(pairs) == 1:
            spared = open_sockets()
    connections = EndedConnections(spared)
    connections.look()
    theirs, ours = pairs[0]
    theirs.sendall(b"x")
    heard = [ours.recv(1), pairs[1][1].recv(1)]
    connections.close()
    return {"heard": heard}
