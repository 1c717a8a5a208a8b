"""Ports for a server that is started with a number and cannot be handed a socket."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000
_HIGHEST = 65_535
_TRIES = 1000


def free_ports(count: int) -> list[int]:
    """So many different ports of loopback on which nobody listens now.

    Not from the range that the kernel hands out to outgoing connections, as binding to port 0
    does: any connection made before the server starts could take such a port away.

    Raises:
        OSError: so many were not found.
    """
    candidates = _candidates(*_handed_out())
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(candidates, min(_TRIES, len(candidates))):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    if len(ports) < count:
        raise OSError(f"{count} free ports of 127.0.0.1 are needed, {len(ports)} were found")
    return ports


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def _handed_out() -> tuple[int, int]:
    try:
        lowest, highest = _EPHEMERAL.read_text().split()
        return int(lowest), int(highest)
    except (OSError, ValueError):
        return 32_768, 60_999


def _candidates(lowest: int, highest: int) -> range:
    """The wider of what is left below and above that range; all, where next to nothing is left."""
    left = max(range(_LOWEST, lowest), range(highest + 1, _HIGHEST + 1), key=len)
    return left if len(left) >= _TRIES else range(_LOWEST, _HIGHEST + 1)
