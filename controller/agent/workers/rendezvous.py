"""The socket on which the ranks of a job meet."""

from __future__ import annotations

import socket

from controller.agent.state import AgentStateError

# Every rank of a large job may connect to rank 0 in the same instant.
_BACKLOG = 4096


def listen(address: str) -> socket.socket:
    """The socket that rank 0's rendezvous takes over, attempt after attempt."""
    try:
        family, _, _, _, target = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server((target[0], 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise AgentStateError(
            f"cannot listen on this node's address {address}: {error}; give its own with --address"
        ) from error
    return listening
