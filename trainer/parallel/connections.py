"""Ending the connections of this process, so that whoever waits at one of them is woken.

Gloo's own abort wakes nobody whose peer still lives; the end of what comes in does. What goes out
must not fail meanwhile: gloo does not tell whoever waits for a message that it could not write
(its `Pair::signalException` passes over messages of unbound buffers). So the connections stay
open, and what still comes in is thrown away, until all ranks have gone their way. A message to a
process that has died, larger than the kernel's buffers, can still not be sent: a rank that waits
for that is not woken.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Collection, Iterator

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_DRAINED_BYTES = 1 << 20


def open_sockets() -> frozenset[str]:
    """The sockets of this process, by the names that the kernel has for them."""
    return frozenset(name for name, _ in _sockets())


class EndedConnections:
    """TCP connections of this process of which nothing is read any more; those that listen go on.

    Not thread-safe.
    """

    def __init__(self, spared: Collection[str] = ()) -> None:
        """`spared`: sockets, as `open_sockets` has them, that are left alone."""
        self._spared = spared
        # By the name that the kernel has for the socket, a descriptor of our own.
        self._held: dict[str, socket.socket] = {}

    def look(self) -> None:
        """End those that have come since the last look; take in what their peers still send.

        It reads the links of all descriptors, which is too much for a loop that lasts.
        """
        users = Counter[str]()
        for target, descriptor in _sockets():
            users[target] += 1
            if target not in self._held and target not in self._spared:
                # Its owner may close it meanwhile.
                with contextlib.suppress(OSError):
                    self._end(target, descriptor)
        for target, held in self._held.items():
            # Not beside its owner, who would lose its place in what comes in.
            if users[target] == 1:
                _drain(held)

    def drain(self) -> None:
        """Take in what peers still send, once all other users of the connections are gone."""
        for held in self._held.values():
            _drain(held)

    def close(self) -> None:
        """Close them, which their peers see."""
        while self._held:
            self._held.popitem()[1].close()

    def _end(self, target: str, descriptor: int) -> None:
        found = socket.socket(fileno=os.dup(descriptor))
        is_tcp = found.family in _INTERNET and found.type & socket.SOCK_STREAM
        if not is_tcp or found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found.close()
            return
        self._held[target] = found
        found.shutdown(socket.SHUT_RD)


def _sockets() -> Iterator[tuple[str, int]]:
    """Each socket that a descriptor of this process is of, and the descriptor."""
    for name in os.listdir("/proc/self/fd"):
        # Its owner may close it meanwhile.
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                yield target, int(name)


def _drain(held: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while held.recv(_DRAINED_BYTES, socket.MSG_DONTWAIT):
            pass
