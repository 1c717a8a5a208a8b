"""A line between agents, hung up by another thread than the one that uses it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from checkpoint.replicas.encryption import Encryption, dialled
from checkpoint.replicas.wire import Line, ReplicaError

WITHIN_S = 30.0


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_its_own_thread_wakes_up_and_closes_it(is_encrypted: bool) -> None:
    """The other one would give the number to another file while TLS may still write to it."""
    encryption = Encryption() if is_encrypted else None
    with socket.create_server(("127.0.0.1", 0)) as server:
        plain = socket.create_connection(server.getsockname(), timeout=WITHIN_S)
        accepted, _ = server.accept()
    link = f"/proc/self/fd/{accepted.fileno()}"
    is_of = os.readlink(link)
    line = Line(accepted)
    receives, woke_up, may_close = threading.Event(), threading.Event(), threading.Event()

    def serve() -> None:
        with line:
            if encryption is not None:
                line.encrypt(encryption)
            receives.set()
            with contextlib.suppress(OSError, ReplicaError):
                line.receive()
            woke_up.set()
            may_close.wait(WITHIN_S)

    thread = threading.Thread(target=serve)
    thread.start()
    with dialled(plain, "" if encryption is None else encryption.token("secret")):
        assert receives.wait(WITHIN_S)
        line.hang_up()
        assert woke_up.wait(WITHIN_S)
        assert os.readlink(link) == is_of
        may_close.set()
        thread.join(WITHIN_S)
        assert not thread.is_alive()
        assert not os.path.lexists(link) or os.readlink(link) != is_of
