"""Sockets between processes of one node, by path.

The kernel takes 107 bytes of a path, and folders of jobs may be deeper: so the folder is opened,
and the path goes through its descriptor. Messages keep their bounds (SOCK_SEQPACKET).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def listen(path: Path) -> socket.socket:
    """A listening socket that only its owner reaches; one that was there before is replaced.

    Whoever connects waits in it until a process that has inherited it accepts.
    """
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _short(path) as short:
            listening.bind(short)
        path.chmod(0o600)
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def connect(path: Path, timeout_s: float) -> socket.socket:
    """A connection to the socket there; the limit holds for what is done with it later, too.

    Raises:
        OSError: there is none, nobody listens, or nobody did in time.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(timeout_s)
    try:
        with _short(path) as short:
            connection.connect(short)
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
